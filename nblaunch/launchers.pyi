# Written by `make stubs` from nblaunch/compat/names.py.
from nblaunch import (
    notebook_launcher as notebook_launcher,
)
from nblaunch.notebook import (
    debug_launcher as debug_launcher,
)
