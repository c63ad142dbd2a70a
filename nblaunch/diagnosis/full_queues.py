"""Ranks that wait for room in a queue or pipe of the kernel.

A ``multiprocessing.SimpleQueue`` or ``Pipe`` holds 64 kB; a bounded queue holds as many values as its size. When the
queue or pipe is full, ``put()`` and ``send()`` wait for a reader. The kernel does not read while it waits for a launch,
but another rank, or another process or thread of the kernel, might. The wait may therefore end, so nblaunch only shows
a note with the line.

    FullQueueDetector  processes -> observe() -> ranks that wait for an object that the kernel also has
    is_confirmed       a rank's stack -> whether the rank is putting a value
    explain            what to do
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nblaunch import formatting
from nblaunch.diagnosis.stacks import Position, frames_inside_user_code
from nblaunch.host.waits import Wait, has_awaited_object, wait_for_others

_PERIOD_S = 0.5
LONG_S = 2.0
"""How long a rank must have waited before it is reported."""

_PUTTING = (
    ("process/queues.py", {"put", "join"}),
    ("processing/queues.py", {"put", "join"}),
    ("process/connection.py", {"_send"}),
    ("processing/connection.py", {"_send"}),
)
"""Source files of ``multiprocessing`` and ``multiprocess``, and functions that wait until another process reads."""


class FullQueueDetector:
    """Reports ranks that wait for a reader, and reports each wait only once.

    A check of a running rank reads only one small file.
    """

    def __init__(self) -> None:
        self._next_s = 0.0
        self._seen: dict[int, tuple[float, Wait]] = {}
        self._reported: dict[int, str] = {}

    def observe(self, now_s: float, pids: Mapping[int, int]) -> set[int]:
        """Check the running ranks, at most twice a second; return those that wait for an object of this process.

        Args:
            now_s: ``time.monotonic()``.
            pids: rank -> process.
        """
        if now_s < self._next_s:
            return set()
        self._next_s = now_s + _PERIOD_S
        return {rank for rank, pid in pids.items() if self._has_begun_to_wait_long(now_s, rank, pid)}

    def _has_begun_to_wait_long(self, now_s: float, rank: int, pid: int) -> bool:
        wait = wait_for_others(pid)
        if wait is None:
            self._seen.pop(rank, None)
            return False
        since_s, before = self._seen.get(rank, (now_s, None))
        if wait != before:
            self._seen[rank] = (now_s, wait)
            return False
        _, address, _ = wait  # asking a rank for its stack increments the number of sleeps
        if now_s - since_s < LONG_S or self._reported.get(rank) == address:
            return False
        self._reported[rank] = address
        return has_awaited_object(pid)


def is_confirmed(position: Position) -> bool:
    """Return whether a rank is in ``put()``, ``send()`` or ``join()`` of a queue or pipe."""
    return any(
        frame.filename.endswith(file) and frame.name in names
        for frame in frames_inside_user_code(position)
        for file, names in _PUTTING
    )


def explain(ranks: Iterable[int]) -> str:
    """Return a message that names the ranks that wait for a reader, and says what to do."""
    return _FULL.format(formatting.ranks(ranks))


_FULL = (
    "{} can't put a value into a queue or pipe that a cell created: it is full, and no process reads it. The kernel "
    "does not read while it waits for the launch. Return the value instead, or put it into a multiprocessing.Queue() "
    "without a size, which the kernel can read after the launch."
)
