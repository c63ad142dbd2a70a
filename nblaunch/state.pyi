# Written by `make stubs` from nblaunch/compat.py.
from nblaunch.training.state import (
    AcceleratorState as AcceleratorState,
    DistributedType as DistributedType,
    GradientState as GradientState,
    PartialState as PartialState,
    is_initialized as is_initialized,
)
