"""Turns: a block of code that only a few workers of a job run at a time.

The locks are record locks on the job's board, which every worker has open however it was started. The system releases
them when their holder ends, so that a worker that is killed in its turn blocks no other.
"""

from __future__ import annotations

import errno
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager

NUM_LANES = 2
"""Workers that are in a turn at the same time. With one, the others' processors lie idle while it waits for memory."""


_INTERVAL_S = 0.02

_ALONE, _BUILDING = NUM_LANES, NUM_LANES + 1
"""Lanes for one worker at a time: blocks that the user marked, and models that are built."""


@contextmanager
def turn(fd: int, rank: int, is_alone: bool = False) -> Iterator[None]:
    """Run the block while at most ``NUM_LANES`` workers are in a turn on the same file; waits for that.

    Args:
        fd: a descriptor of the file. Only its first bytes are locked, and nothing of it is read or written.
        rank: of this worker, which decides on its lane.
        is_alone: let only one worker be in its block, among all that say so.
    """
    lane = _ALONE if is_alone else rank % NUM_LANES
    fcntl.lockf(fd, fcntl.LOCK_EX, 1, lane)
    try:
        yield
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN, 1, lane)


def take_building_turn(fd: int, patience_s: float) -> bool:
    """Wait for the turn to build a model, of which there is one; False where it was not to be had in time.

    It lasts until :func:`end_building_turn`, or until the process ends.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _BUILDING)
            return True
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_INTERVAL_S)


def end_building_turn(fd: int) -> None:
    """Let the next worker build."""
    fcntl.lockf(fd, fcntl.LOCK_UN, 1, _BUILDING)
