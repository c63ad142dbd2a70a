"""Turns: blocks that only some workers of a machine run at the same time.

The locks are record locks on the file of the progress board, which every worker has open however it was started. The
file is neither read nor written here. The system releases the locks of a process that
ends, so a worker that is killed in its turn blocks no other.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

NUM_LANES = 2
"""Workers in a shared turn at the same time. With one, the others' processors lie idle while it waits for memory."""


class Turns:
    """Turns of one worker.

    Args:
        fd: descriptor of the file that all workers lock; -1 = there are no other workers, and no turn waits.
        rank: of this worker.
    """

    def __init__(self, fd: int = -1, rank: int = 0) -> None:
        self._fd = fd
        self._lane = rank % NUM_LANES

    def shared(self) -> AbstractContextManager[None]:
        """Return a context manager that at most ``NUM_LANES`` workers enter at the same time."""
        return self._locked(self._lane)

    def exclusive(self) -> AbstractContextManager[None]:
        """Return a context manager that one worker enters at a time; it does not wait for shared turns."""
        return self._locked(NUM_LANES)

    def detach(self) -> None:
        """Wait for no turn any more, in a process forked by the worker: that may be in its turn, and wait for it."""
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
