# Written by `make stubs` from nblaunch/compat.py.
from nblaunch.training.utilities.local_sgd import (
    LocalSGD as LocalSGD,
)
