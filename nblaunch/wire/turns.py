"""Turns: a block of code that one worker of a job runs at a time.

The lock is a record lock on the job's board, which every worker has open however it was started. The system releases it
when its holder ends, so that a worker that is killed in its turn holds nobody up.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def turn(fd: int) -> Iterator[None]:
    """Run the block while no other process is in a turn on the same file; waits for that.

    Args:
        fd: a descriptor of the file. Only its first byte is locked, and nothing of it is read or written.
    """
    fcntl.lockf(fd, fcntl.LOCK_EX, 1, 0)
    try:
        yield
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN, 1, 0)
