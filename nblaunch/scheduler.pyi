# Written by `make stubs` from nblaunch/compat/names.py.
from nblaunch.training.optimizer import (
    AcceleratedScheduler as AcceleratedScheduler,
)
