"""Logging, under the name that scripts written for Hugging Face Accelerate import it from.

This module only hands on objects that live in ``nblaunch.training``; it defines nothing.
"""

from __future__ import annotations

from nblaunch.training.log import MultiProcessAdapter, get_logger

__all__ = [
    "MultiProcessAdapter",
    "get_logger",
]
