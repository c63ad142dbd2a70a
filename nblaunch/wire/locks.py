"""Locks that the workers of a job on one machine share.

They are record locks on the progress board's file, which every worker has open, whatever its start method. This module
neither reads nor writes the file. The system releases the locks of a process that ends, so a worker that is killed
while it holds a lock does not block others.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

MAX_HOLDERS = 2
"""Number of workers that may hold the semaphore at the same time. With a single holder, the other processors would be
idle while the holder waited for memory.
"""


class WorkerLocks:
    """One worker's view of two locks and a semaphore, which are independent.

    Args:
        fd: descriptor of the file that all workers lock; -1 = there are no other workers, so calls never wait.
        rank: rank of this worker.
    """

    def __init__(self, fd: int = -1, rank: int = 0) -> None:
        self._fd = fd
        self._slot = rank % MAX_HOLDERS

    def lock(self) -> AbstractContextManager[None]:
        """Return a context manager that only one worker can enter at a time."""
        return self._locked(MAX_HOLDERS)

    def semaphore(self) -> AbstractContextManager[None]:
        """Return a context manager that at most ``MAX_HOLDERS`` workers can enter at the same time.

        Workers whose ranks differ by a multiple of ``MAX_HOLDERS`` wait for each other, even while a place is free.
        """
        return self._locked(self._slot)

    def moment(self) -> AbstractContextManager[None]:
        """Return a lock for short sections of nblaunch's code; a worker may already hold the lock or the semaphore."""
        return self._locked(MAX_HOLDERS + 1)

    def detach(self) -> None:
        """Stop waiting for locks in a worker's child: the worker may hold a lock while waiting for the child."""
        self._fd = -1

    @contextmanager
    def _locked(self, byte: int) -> Iterator[None]:
        fd = self._fd
        if fd < 0:
            yield
            return
        fcntl.lockf(fd, fcntl.LOCK_EX, 1, byte)
        try:
            yield
        finally:
            fcntl.lockf(fd, fcntl.LOCK_UN, 1, byte)
