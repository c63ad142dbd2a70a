"""Turns: a block of code that only a few workers of a job run at a time.

The locks are record locks on the job's board, which every worker has open however it was started. The system releases
them when their holder ends, so that a worker that is killed in its turn holds nobody up.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager

NUM_LANES = 2
"""Workers that are in a turn at the same time. With one, the others' processors lie idle while it waits for memory."""


@contextmanager
def turn(fd: int, rank: int) -> Iterator[None]:
    """Run the block while at most ``NUM_LANES`` workers are in a turn on the same file; waits for that.

    Args:
        fd: a descriptor of the file. Only its first bytes are locked, and nothing of it is read or written.
        rank: of this worker, which decides on its lane.
    """
    lane = rank % NUM_LANES
    fcntl.lockf(fd, fcntl.LOCK_EX, 1, lane)
    try:
        yield
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN, 1, lane)
