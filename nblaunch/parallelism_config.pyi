# Written by `make stubs` from nblaunch/compat.py.
from nblaunch.training.parallelism import (
    ParallelismConfig as ParallelismConfig,
)
