"""Escalation of a stop: SIGINT, a grace for ``finally`` blocks, SIGTERM, SIGKILL. Pure arithmetic; sends nothing."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

TERM_GRACE_S = 1.0
"""From SIGTERM to SIGKILL. SIGTERM already ends a worker that has no handler of its own."""

COLLECT_S = 0.3
"""After the first failure: time for other ranks to report theirs before any is signalled."""

UNRESPONSIVE_GRACE_S = 0.7
"""After a failure: for workers that have not noticed their SIGINT. They are blocked in C code, mostly in a collective
that will never end, and no ``finally`` of theirs is running."""


@dataclass(frozen=True)
class Step:
    """At ``at_s`` after the escalation began, send ``signum``."""

    at_s: float
    signum: int


@dataclass
class Escalation:
    """When which rank gets which signal.

    Args:
        began_s: ``time.monotonic()`` when it began.
        steps: for ranks whose Python code noticed SIGINT.
        unresponsive_steps: for ranks that did not.
    """

    began_s: float
    steps: tuple[Step, ...]
    unresponsive_steps: tuple[Step, ...]
    _taken: dict[int, int] = field(default_factory=dict)

    @classmethod
    def after_interrupt(cls, now_s: float, grace_s: float) -> Escalation:
        """Return that of an interrupt by the user: SIGINT at once, and the whole grace for all ranks."""
        steps = _from_interrupt(0.0, grace_s)
        return cls(now_s, steps, steps)

    @classmethod
    def after_failure(cls, now_s: float, grace_s: float) -> Escalation:
        """Return that of a failed rank: collect the others' failures first; grace only where it can be of use."""
        return cls(
            now_s,
            _from_interrupt(COLLECT_S, grace_s),
            _from_interrupt(COLLECT_S, min(grace_s, UNRESPONSIVE_GRACE_S)),
        )

    @classmethod
    def kill(cls, now_s: float) -> Escalation:
        """Return one that sends SIGKILL at once."""
        steps = (Step(0.0, signal.SIGKILL),)
        return cls(now_s, steps, steps)

    def due(
        self, now_s: float, alive: Iterable[int], noticed: Callable[[int], bool]
    ) -> list[tuple[int, int]]:
        """Return the (rank, signal) pairs to send now. Each step of each rank is returned once."""
        signals = []
        for rank in alive:
            steps = self._steps(rank, noticed)
            taken = self._taken.get(rank, 0)
            while taken < len(steps) and self.began_s + steps[taken].at_s <= now_s:
                signals.append((rank, steps[taken].signum))
                taken += 1
            self._taken[rank] = taken
        return signals

    def next_s(self, alive: Iterable[int], noticed: Callable[[int], bool]) -> float | None:
        """Return the time of the next step of any rank; None when nothing is left to do but wait."""
        times = []
        for rank in alive:
            steps, taken = self._steps(rank, noticed), self._taken.get(rank, 0)
            if taken < len(steps):
                times.append(self.began_s + steps[taken].at_s)
        return min(times, default=None)

    def _steps(self, rank: int, noticed: Callable[[int], bool]) -> tuple[Step, ...]:
        return self.steps if noticed(rank) else self.unresponsive_steps


def _from_interrupt(first_s: float, grace_s: float) -> tuple[Step, ...]:
    return (
        Step(first_s, signal.SIGINT),
        Step(first_s + grace_s, signal.SIGTERM),
        Step(first_s + grace_s + TERM_GRACE_S, signal.SIGKILL),
    )
