"""What workers take of the host's memory, looked at from outside while they run.

The true number, in which shared pages count in parts, is dear: the system walks all pages of the process, 12 ms for
each GB. It is read in turn, rank by rank, and as rarely as to take a hundredth of the launcher's time; in between it is
carried forward by what is cheap to read, the growth of the process's own pages. Workers notice nothing of either.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nblaunch.events import HostMemory
from nblaunch.host import memory, proc

INTERVAL_S = 2.0
"""Between two readings of the true number of a rank, at least."""

_CHEAP_INTERVAL_S = 1.0
_MAX_SHARE = 0.01  # of the launcher's time


@dataclass
class _Known:
    """A rank's true number when it was last read, and its own pages then; None where the system has no such number."""

    proportional: int | None
    own: int
    read_s: float


class MemoryWatch:
    """Reads the memory of workers now and then.

    Args:
        proportional_bytes: reads the true number of a process; None where the system does not report it.
        own_bytes: reads the size of its own pages, quickly; None where the process is gone.
        clock: seconds on a clock that never jumps.
    """

    def __init__(
        self,
        *,
        proportional_bytes: Callable[[int], int | None] = memory.proportional_bytes,
        own_bytes: Callable[[int], int | None] = proc.own_bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._proportional_bytes = proportional_bytes
        self._own_bytes = own_bytes
        self._clock = clock
        self._known: dict[int, _Known] = {}
        self._next_read_s = self._next_look_s = 0.0

    def look(self, pids: Mapping[int, int]) -> list[HostMemory]:
        """Return what there is to report about the ranks in ``pids`` (rank -> process); nothing most of the time."""
        now_s = self._clock()
        if now_s >= self._next_read_s:
            self._read_one(pids, now_s)
        if now_s < self._next_look_s:
            return []
        self._next_look_s = now_s + _CHEAP_INTERVAL_S
        return [event for rank, pid in pids.items() if (event := self._estimate(rank, pid)) is not None]

    def _read_one(self, pids: Mapping[int, int], now_s: float) -> None:
        """Read the rank whose number is the oldest, if it is old enough; the dearer it was, the later the next."""
        due = [
            rank for rank in pids if rank not in self._known or now_s - self._known[rank].read_s >= INTERVAL_S
        ]
        if not due:
            return
        rank = min(due, key=lambda rank: self._known[rank].read_s if rank in self._known else 0.0)
        own = self._own_bytes(pids[rank])
        if own is None:
            return
        self._known[rank] = _Known(self._proportional_bytes(pids[rank]), own, now_s)
        self._next_read_s = self._clock() + (self._clock() - now_s) / _MAX_SHARE

    def _estimate(self, rank: int, pid: int) -> HostMemory | None:
        # Workers of a job share the same pages, so until a rank's turn comes, another one's shared part will do: a
        # table that knows some ranks only would give a sum that is none.
        known = self._known.get(rank) or next(iter(self._known.values()), None)
        own = self._own_bytes(pid)
        if own is None or known is None:
            return None
        if known.proportional is None:
            return HostMemory(rank, time.time(), own, is_proportional=False)
        return HostMemory(rank, time.time(), max(known.proportional + own - known.own, 0))
