# Written by `make stubs` from nblaunch/compat.py.
from nblaunch.training.optimizer import (
    AcceleratedScheduler as AcceleratedScheduler,
)
