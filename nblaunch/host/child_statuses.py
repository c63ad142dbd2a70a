"""Exit statuses of child processes, in a process that ignores SIGCHLD.

Where SIGCHLD is ignored, the system discards how a child has ended (wait(2), "Notes"). A kernel may ignore it because a
cell says so, or because the program that started the kernel did. While workers run, the system has the signal's
default, which ignores it as well, but keeps statuses.

The disposition is set in C, for two reasons: any thread may do so, and ``signal.getsignal`` still returns what the user
has chosen, so that the choice holds again afterwards.
"""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_set_disposition = ctypes.CDLL(None).signal
_set_disposition.argtypes = (ctypes.c_int, ctypes.c_void_p)
_set_disposition.restype = ctypes.c_void_p

_lock = threading.Lock()
_num_blocks = 0


@contextmanager
def kept() -> Iterator[None]:
    """Have the system keep the exit statuses of children in the block. Blocks of several threads may overlap."""
    global _num_blocks
    with _lock:
        _num_blocks += 1
        _change(signal.SIG_DFL)
    try:
        yield
    finally:
        with _lock:
            _num_blocks -= 1
            if not _num_blocks:
                _change(signal.SIG_IGN)


def _change(disposition: signal.Handlers) -> None:
    """Set the disposition of SIGCHLD, unless the user has a handler or the default."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        _set_disposition(signal.SIGCHLD, int(disposition))
