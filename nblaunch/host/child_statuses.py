"""Exit statuses of child processes, in a process that ignores SIGCHLD.

If SIGCHLD is ignored, the system forgets how a child has ended (wait(2), "Notes"). A kernel may ignore it because a
cell or the program that started the kernel did so. While workers run, this module sets the signal's disposition to the
system's default, which also ignores it but keeps exit statuses.

The disposition is set in C for two reasons: any thread may do so, and ``signal.getsignal`` still returns the user's
choice, which applies again afterwards.
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
    """Make the system keep children's exit statuses during the block. Blocks in several threads may overlap."""
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
    """Set the disposition of SIGCHLD, but only while the user has chosen to ignore the signal."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        _set_disposition(signal.SIGCHLD, int(disposition))
