"""Looking at the running processes from outside, a few times a second: memory they take, and whether they move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nblaunch.host import proc
from nblaunch.launch.diagnosis import memory
from nblaunch.launch.diagnosis.hang import Mark, Watchdog
from nblaunch.launch.diagnosis.memory import MemoryFacts
from nblaunch.wire.board import Sample

_INTERVAL_S = 0.25


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
        self, now_s: float, pids: Mapping[int, int], samples: Sequence[Sample], said: Mapping[int, int]
    ) -> bool:
        """Look, if it is time; True if a rank has just been found to hang.

        Args:
            now_s: ``time.monotonic()``.
            pids: rank -> process, of the ranks that run.
            samples: the board.
            said: rank -> how much it has told and printed so far.
        """
        if now_s < self._next_s:
            return False
        self._next_s = now_s + _INTERVAL_S
        self.memory.add(pids)
        if self._watchdog is None:
            return False
        marks = {
            rank: Mark(_progress(samples[rank], said.get(rank, 0)), proc.cpu_seconds(pid))
            for rank, pid in pids.items()
        }
        return self._watchdog.observe(now_s, marks)


def _progress(sample: Sample, said: int) -> tuple[object, ...]:
    return (sample.step, sample.samples, sample.epoch, sample.state, said)
