# Written by `make stubs` from nblaunch/compat.py.
from nblaunch import (
    notebook_launcher as notebook_launcher,
)
from nblaunch.notebook import (
    debug_launcher as debug_launcher,
)
