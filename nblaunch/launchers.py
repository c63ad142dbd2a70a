"""Launchers, under the name that scripts written for Hugging Face Accelerate import them from.

This module only hands on objects that live in ``nblaunch.training`` or in ``nblaunch.notebook``; it defines nothing.
"""

from __future__ import annotations

from nblaunch.notebook import debug_launcher, notebook_launcher

__all__ = [
    "debug_launcher",
    "notebook_launcher",
]
