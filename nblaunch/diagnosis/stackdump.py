"""Collecting every rank's Python stack: a signal to each, then reading what faulthandler appends to its file."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from nblaunch.diagnosis.hang import NO_ANSWER, Position, position_of
from nblaunch.host import disk, proc
from nblaunch.wire.assignment import STACKS_SIGNAL

_DEADLINE_S = 0.8
_QUIET_S = 0.03
"""faulthandler writes line by line; a file that has not grown for this long is complete."""

_STACK_BYTES = 1 << 14
"""What the stacks of a rank's threads may take."""


class StackDump:
    """One collection. ``poll`` it until :attr:`is_done`; it never waits.

    Args:
        pids: rank -> process; only ranks that have sent ``Started``, whose handler is in place. (To any other
            process the signal would be deadly.)
        paths: rank -> the file that its faulthandler writes to.
    """

    def __init__(self, pids: Mapping[int, int], paths: Mapping[int, Path]) -> None:
        self._pids = dict(pids)
        self._paths = paths
        self._offsets = {rank: _size(paths[rank]) for rank in pids}
        self._sizes = dict(self._offsets)
        self._changed_s = self._began_s = time.monotonic()
        self.is_done = not pids
        for pid in pids.values():
            with suppress(ProcessLookupError):  # a forkserver's worker may have ended without our knowing yet
                os.kill(pid, STACKS_SIGNAL)

    def poll(self) -> None:
        """Look whether all have answered and finished writing, or the time is over."""
        now = time.monotonic()
        sizes = {rank: _size(self._paths[rank]) for rank in self._pids}
        if sizes != self._sizes:
            self._sizes, self._changed_s = sizes, now
        have_all = all(sizes[rank] > self._offsets[rank] for rank in sizes)
        self.is_done = (have_all and now - self._changed_s > _QUIET_S) or now - self._began_s > _DEADLINE_S

    def positions(self) -> dict[int, Position]:
        """Where each rank is, by what it wrote."""
        return {rank: self._position(rank) for rank in self._pids}

    def _position(self, rank: int) -> Position:
        state = proc.unusual_state(self._pids[rank])
        if self._sizes[rank] == self._offsets[rank] and state is not None:
            return Position(f"no answer: the process is {state}")
        path = self._paths[rank]
        try:
            with path.open("rb") as file:
                file.seek(self._offsets[rank])
                position = position_of(file.read().decode(errors="replace"))
        except OSError as error:  # the folder of logs may be deleted while the job runs
            return Position(f"no answer: {path} can't be read: {error.strerror}")
        if position is None:
            refusal = disk.refuses_growth(path, _STACK_BYTES)
            return Position(f"its stack can't be written: {refusal}") if refusal else NO_ANSWER
        return position


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
