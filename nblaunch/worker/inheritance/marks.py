"""Marks library objects that this process has created or made usable, as opposed to inherited ones."""

from __future__ import annotations

import os
from typing import Any

_MARK = "_nblaunch_process"
"""Attribute that holds the id of the process."""


def mark(instance: Any) -> None:
    """Mark an object as belonging to this process."""
    setattr(instance, _MARK, os.getpid())


def is_marked(instance: Any) -> bool:
    """Return whether this process, rather than one that it was forked from, has marked the object."""
    return vars(instance).get(_MARK) == os.getpid()
