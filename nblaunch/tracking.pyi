# Written by `make stubs` from nblaunch/compat.py.
from nblaunch.training.trackers import (
    CometMLTracker as CometMLTracker,
    GeneralTracker as GeneralTracker,
    JsonlTracker as JsonlTracker,
    MLflowTracker as MLflowTracker,
    SwanLabTracker as SwanLabTracker,
    TensorBoardTracker as TensorBoardTracker,
    TrackioTracker as TrackioTracker,
    WandBTracker as WandBTracker,
    on_main_process as on_main_process,
)
from nblaunch.training.tracking import (
    LOGGER_TYPE_TO_CLASS as LOGGER_TYPE_TO_CLASS,
    register_tracker_class as register_tracker_class,
)
