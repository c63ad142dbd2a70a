"""File descriptors, and which ones forked children must not keep.

Every process that nblaunch or other code forks from the kernel inherits its descriptors. A child that kept the write
end of a guardian's pipe would hide the kernel's death from that guardian; a child that kept a listening socket would
keep its port open. Every child therefore closes the registered descriptors as soon as it is forked. For descriptors
that exist only for a moment, :func:`forks_held_back` delays forks.
"""

from __future__ import annotations

import fcntl
import os
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_HIGH = 960
"""This is below the usual limit of 1024. Higher numbers cost memory: the system's table extends to the highest."""

_kernel_only: set[int] = set()
_forking = threading.RLock()


def keep_from_children(*fds: int) -> None:
    """Close ``fds`` in every process that this process forks from now on."""
    _kernel_only.update(fds)


def is_kept_from_children(fd: int) -> bool:
    """Return whether ``fd`` is registered by :func:`keep_from_children`."""
    return fd in _kernel_only


@contextmanager
def forks_held_back() -> Iterator[None]:
    """Hold back forks in other threads while the block runs.

    ``subprocess.Popen`` waits until no process holds the write end of its pipe, so if another thread forked a child in
    the meantime, ``Popen`` would wait until that child ended.
    """
    with _forking:
        yield


def close(*fds: int) -> None:
    """Close registered descriptors in this process."""
    for fd in fds:
        _kernel_only.discard(fd)
        os.close(fd)


def forget(*fds: int) -> None:
    """Forget descriptors that other code has closed or now owns."""
    _kernel_only.difference_update(fds)


def occupy_standard_ones() -> None:
    """Open ``/dev/null`` for each of the descriptors 0, 1 and 2 that is closed.

    Otherwise, the next pipe would get one of these numbers, and a child's output would go into the pipe.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one


def check_room(count: int) -> None:
    """Raise ``OSError`` if this process can't open ``count`` more descriptors."""
    opened: list[int] = []
    try:
        while len(opened) < count:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for fd in opened:
            os.close(fd)


def is_high(fd: int) -> bool:
    """Return whether ``fd`` is too high for code that closes all low descriptors."""
    return fd >= _HIGH


def high_copy(fd: int) -> int:
    """Return a copy of a descriptor, with a number too high for code that closes all low descriptors.

    Return ``fd`` itself if it is negative or already high, or if the process may not open high descriptors.
    """
    if fd < 0 or is_high(fd):
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _HIGH)
    except OSError:
        return fd


def moved_high(fd: int) -> int:
    """Return a copy of ``fd`` made by :func:`high_copy`; close ``fd``."""
    high = high_copy(fd)
    if high != fd:
        os.close(fd)
    return high


def _close_in_child() -> None:
    global _forking
    _forking = threading.RLock()  # a thread that does not exist in this child may hold the old lock
    for fd in _kernel_only:
        os.close(fd)
    _kernel_only.clear()


os.register_at_fork(
    before=lambda: _forking.acquire(),
    after_in_parent=lambda: _forking.release(),
    after_in_child=_close_in_child,
)


def is_writable(fd: int) -> bool:
    """Return whether a write to ``fd`` would end immediately: it would succeed, or fail because the reader has gone."""
    poller = select.poll()  # select.select rejects descriptors of 1024 and above
    poller.register(fd, select.POLLOUT)
    return bool(poller.poll(0))
