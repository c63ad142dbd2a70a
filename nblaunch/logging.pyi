# Written by `make stubs` from nblaunch/compat.py.
from nblaunch.training.utilities.log import (
    MultiProcessAdapter as MultiProcessAdapter,
    get_logger as get_logger,
)
