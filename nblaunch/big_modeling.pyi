# Written by `make stubs` from nblaunch/compat.py.
from nblaunch.training.checkpoints.load_weights import (
    load_checkpoint_and_dispatch as load_checkpoint_and_dispatch,
    load_checkpoint_in_model as load_checkpoint_in_model,
)
from nblaunch.training.utilities.memory import (
    init_empty_weights as init_empty_weights,
    init_on_device as init_on_device,
)
