# Written by `make stubs` from nblaunch/compat/names.py.
from nblaunch.training.utilities.local_sgd import (
    LocalSGD as LocalSGD,
)
