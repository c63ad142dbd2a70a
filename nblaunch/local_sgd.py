"""LocalSGD, under the name that scripts written for Hugging Face Accelerate import it from.

This module only hands on objects that live in ``nblaunch.training``; it defines nothing.
"""

from __future__ import annotations

from nblaunch.training.local_sgd import LocalSGD

__all__ = [
    "LocalSGD",
]
