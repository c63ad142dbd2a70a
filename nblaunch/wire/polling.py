"""Waiting for descriptors, whatever their numbers: ``select.select`` takes none from 1024 on, and a kernel may have
many files open.
"""

from __future__ import annotations

import select
from collections.abc import Iterable


def wait_until_readable(fds: Iterable[int], timeout_s: float | None = None) -> None:
    """Wait until one of ``fds`` has something to read or was closed by the other side.

    Args:
        fds: without any, the time is waited out.
        timeout_s: seconds to wait at most; None = as long as it takes.
    """
    _poll(fds, select.POLLIN, timeout_s)


def is_writable(fd: int) -> bool:
    """Whether a write to ``fd`` would be taken now, or refused because the reader has gone."""
    return _poll([fd], select.POLLOUT, 0.0)


def _poll(fds: Iterable[int], what: int, timeout_s: float | None) -> bool:
    poller = select.poll()
    for fd in fds:
        poller.register(fd, what)
    return bool(poller.poll(None if timeout_s is None else timeout_s * 1000))
