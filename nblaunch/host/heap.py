"""Python's garbage collector: the objects that it tracks in this process, and periods in which it ignores them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_FROZEN_BY_PYTHON = 2000
"""If more objects than this are frozen, the heap counts as frozen: Python 3.12 itself freezes only a few hundred,
whereas a process with torch has 200,000.
"""


@contextmanager
def frozen() -> Iterator[None]:
    """Make the garbage collector in forked processes ignore the objects that they share with this process.

    A garbage collection writes to the header of every object that it visits, which would copy the object's page.
    """
    was_frozen = _is_frozen()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


@contextmanager
def growing() -> Iterator[None]:
    """Pause garbage collection while a process imports large packages; later collections ignore the packages' objects.

    The collector would otherwise visit the same objects dozens of times, which would take up a tenth of torch's import
    time.
    """
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    try:
        yield
    finally:
        gc.freeze()
        if gc.get_threshold()[0] == 0:  # no import has set its own
            gc.set_threshold(*thresholds)


def all_objects() -> list[Any]:
    """Return all objects, even if the user has frozen the heap: the collector does not list frozen objects."""
    if not _is_frozen():
        return gc.get_objects()
    gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        gc.freeze()


def _is_frozen() -> bool:
    return gc.get_freeze_count() > _FROZEN_BY_PYTHON
