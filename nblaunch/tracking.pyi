# Written by `make stubs` from nblaunch/compat/names.py.
from nblaunch.training.trackers.base import (
    GeneralTracker as GeneralTracker,
)
from nblaunch.training.trackers.jsonl import (
    JsonlTracker as JsonlTracker,
)
from nblaunch.training.trackers.mlflow import (
    MLflowTracker as MLflowTracker,
)
from nblaunch.training.trackers.tensorboard import (
    TensorBoardTracker as TensorBoardTracker,
)
from nblaunch.training.trackers.wandb import (
    WandBTracker as WandBTracker,
)
from nblaunch.training.tracking import (
    register_tracker_class as register_tracker_class,
)
