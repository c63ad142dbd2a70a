"""Trackers, under the name that scripts written for Hugging Face Accelerate import them from.

This module only hands on objects that live in ``nblaunch.training``; it defines nothing.
"""

from __future__ import annotations

from nblaunch.training.trackers.base import GeneralTracker
from nblaunch.training.trackers.jsonl import JsonlTracker
from nblaunch.training.trackers.mlflow import MLflowTracker
from nblaunch.training.trackers.tensorboard import TensorBoardTracker
from nblaunch.training.trackers.wandb import WandBTracker
from nblaunch.training.tracking import register_tracker_class

__all__ = [
    "GeneralTracker",
    "JsonlTracker",
    "MLflowTracker",
    "TensorBoardTracker",
    "WandBTracker",
    "register_tracker_class",
]
