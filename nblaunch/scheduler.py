"""The scheduler wrapper, under the name that scripts written for Hugging Face Accelerate import it from.

This module only hands on objects that live in ``nblaunch.training``; it defines nothing.
"""

from __future__ import annotations

from nblaunch.training.optimizer import AcceleratedScheduler

__all__ = [
    "AcceleratedScheduler",
]
