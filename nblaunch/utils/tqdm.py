"""Progress bars, under the name that scripts written for Hugging Face Accelerate import them from.

This module only hands on objects that live in ``nblaunch.training``; it defines nothing. It is a file, and not an alias
as the other modules of this folder, because it shares its name with what it hands on: once it is loaded, the folder's
own attribute can be the function again.
"""

from __future__ import annotations

from nblaunch.training.bars import tqdm

__all__ = [
    "tqdm",
]
