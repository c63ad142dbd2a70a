"""The objects of this process that Python's collector knows, and the time in which it leaves them alone."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_FROZEN_BY_PYTHON = 2000
"""Python 3.12 starts with some hundred frozen objects; a frozen heap with torch in it has 200,000."""


@contextmanager
def frozen() -> Iterator[None]:
    """Keep the collector of forked processes away from the objects that they share with this one.

    A collection writes to the header of every object that it looks at, which would copy the page it lies on.
    """
    was_frozen = _is_frozen()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


def all_objects() -> list[Any]:
    """Return all objects, also where the user has frozen the heap: the collector does not list what is frozen."""
    if not _is_frozen():
        return gc.get_objects()
    gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        gc.freeze()


def _is_frozen() -> bool:
    return gc.get_freeze_count() > _FROZEN_BY_PYTHON
