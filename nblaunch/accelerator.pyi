# Written by `make stubs` from nblaunch/compat.py.
from nblaunch.training.accelerator import (
    Accelerator as Accelerator,
)
