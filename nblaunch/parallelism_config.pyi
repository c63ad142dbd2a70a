# Written by `make stubs` from nblaunch/compat/names.py.
from nblaunch.training.parallelism import (
    ParallelismConfig as ParallelismConfig,
)
