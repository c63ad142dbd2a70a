"""Looking at the running processes from outside, a few times a second: memory they take, and whether they move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nblaunch.diagnosis import memory
from nblaunch.diagnosis.hang import Position
from nblaunch.diagnosis.memory import MemoryFacts
from nblaunch.diagnosis.watchdog import Finding, Look, Progress, Watchdog
from nblaunch.events import WorkerState
from nblaunch.host import proc
from nblaunch.wire.board import Sample

_INTERVAL_S = 0.25

_WORKING = (WorkerState.STARTING, WorkerState.COMPILING)
"""States in which a rank is known to be at work, for as long as they last."""


@dataclass
class MemoryRecord:
    """Memory over one attempt, in bytes.

    Args:
        before: the host's when it began.
        lowest_available: the least that was available while it ran; None where unknown.
        own_bytes: rank -> most memory of its own that was seen.
    """

    before: MemoryFacts = field(default_factory=memory.read_facts)
    lowest_available: int | None = None
    own_bytes: dict[int, int] = field(default_factory=dict)

    def add(self, pids: Mapping[int, int]) -> None:
        """Look once."""
        for rank, pid in pids.items():
            taken = proc.own_bytes(pid)
            if taken is not None:
                self.own_bytes[rank] = max(taken, self.own_bytes.get(rank, 0))
        available = memory.read_facts().available
        if available is not None:
            self.lowest_available = min(available, self.lowest_available or available)


class Inspector:
    """Keeps the record of one attempt.

    Args:
        hang_timeout_s: seconds without progress of a rank that count as a hang; None = never.
    """

    def __init__(self, hang_timeout_s: float | None) -> None:
        self.memory = MemoryRecord()
        self.hang_timeout_s = hang_timeout_s
        self._watchdog = Watchdog(hang_timeout_s) if hang_timeout_s is not None else None
        self._next_s = 0.0

    def look(
        self,
        now_s: float,
        pids: Mapping[int, int],
        samples: Sequence[Sample],
        num_metrics: Mapping[int, int],
        num_outputs: Mapping[int, int],
    ) -> bool:
        """Look, if it is time; True if the stacks of all ranks are wanted, for :meth:`judge`.

        Args:
            now_s: ``time.monotonic()``.
            pids: rank -> process, of the ranks that run here.
            samples: the board.
            num_metrics: rank -> how often it has logged values.
            num_outputs: rank -> how much else it has shown and printed so far.
        """
        if now_s < self._next_s:
            return False
        self._next_s = now_s + _INTERVAL_S
        self.memory.add(pids)
        if self._watchdog is None:
            return False
        progress = {
            sample.rank: _progress(
                now_s, sample, num_metrics.get(sample.rank, 0), num_outputs.get(sample.rank, 0)
            )
            for sample in samples
        }
        return self._watchdog.observe(now_s, progress, list(pids))

    def judge(
        self, now_s: float, pids: Mapping[int, int], positions: Mapping[int, Position]
    ) -> Finding | None:
        """What the watchdog makes of the stacks it wanted; None if there is nothing new to report."""
        if self._watchdog is None:
            return None
        session_s = proc.session_cpu_seconds(pids.values())
        looks = {
            # 0 of a session: nothing can be read.
            rank: Look(positions[rank], proc.main_thread_cpu_seconds(pid), session_s[pid] or None)
            for rank, pid in pids.items()
            if rank in positions
        }
        return self._watchdog.judge(now_s, looks)


def _progress(now_s: float, sample: Sample, num_metrics: int, num_outputs: int) -> Progress:
    working_s = now_s if sample.state in _WORKING else 0.0
    steps = (sample.step, sample.samples, sample.epoch, sample.num_updates)
    marks = (sample.state, sample.num_marks, sample.num_checks, sample.built_bytes, num_metrics, working_s)
    return Progress((*steps, *marks), has_stepped=any(steps), num_outputs=num_outputs)
