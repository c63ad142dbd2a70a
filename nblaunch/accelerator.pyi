# Written by `make stubs` from nblaunch/compat/names.py.
from nblaunch.training.accelerator import (
    Accelerator as Accelerator,
)
