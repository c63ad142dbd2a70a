"""Trackers of experiments: one file each. See ``base.py`` for what a tracker has to say."""

from __future__ import annotations

from nblaunch.training.trackers.base import GeneralTracker, on_main_process
from nblaunch.training.trackers.jsonl import JsonlTracker
from nblaunch.training.trackers.mlflow import MLflowTracker
from nblaunch.training.trackers.tensorboard import TensorBoardTracker
from nblaunch.training.trackers.wandb import WandBTracker

__all__ = [
    "BUILT_IN",
    "GeneralTracker",
    "JsonlTracker",
    "MLflowTracker",
    "TensorBoardTracker",
    "WandBTracker",
    "on_main_process",
]

BUILT_IN: tuple[type[GeneralTracker], ...] = (JsonlTracker, MLflowTracker, TensorBoardTracker, WandBTracker)
