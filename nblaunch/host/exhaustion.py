"""Detects that no file descriptor is free in this process or the system, and waits until one is.

This module can be imported on every system, unlike ``descriptors.py``, which needs forks. On Windows, nblaunch must be
importable to say what it needs.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_RETRY_S = 0.1


def is_exhausted(error: OSError) -> bool:
    """Return whether ``error`` means that this process, or the system, has no free descriptor."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


def when_free(call: Callable[[], T], patience_s: float) -> T:
    """Return ``call()``; wait up to ``patience_s`` seconds while it fails because no descriptor is free."""
    until_s = time.monotonic() + patience_s
    while True:
        try:
            return call()
        except OSError as error:
            if not is_exhausted(error) or time.monotonic() >= until_s:
                raise
            time.sleep(_RETRY_S)
