"""Stops a job with one signal after another, or first asks it to stop at an agreed step.

An interrupt, the failure of a rank, or a hang (:class:`Escalation`) leads to SIGINT, time for ``finally`` blocks,
SIGTERM and SIGKILL. After a failure or a hang, SIGINT is delayed so that other ranks can report their own failures, and
ranks that are blocked in C code, for example in a collective, get less than a second to end. This class only computes
times; it sends nothing.

SIGTERM to the launcher (:class:`Termination`) means that a batch system will soon reclaim the machine, so training must
end in an orderly way:

    SIGTERM ──> ranks that handle SIGTERM themselves get it, including ranks that begin later
            ──> ``accelerator.should_stop`` turns true, at the same step on every rank
            ──> when the grace period is over, or soon if no rank handles SIGTERM: an interrupt, which escalates

A first interrupt must not lose any value or weights (:class:`SendingRanks`). A rank is therefore not signalled between
the end of its function and its last :class:`nblaunch.events.StateSent`, whatever its code does in between, such as
``state_dict`` or ``__getstate__``:

    every rank has returned     the launcher waits without a limit; a second interrupt ends the wait
    some ranks have not         a sending rank may be waiting for them in a collective, so it must keep writing
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from nblaunch import formatting
from nblaunch.diagnosis.report import AttemptReport
from nblaunch.events import WorkerState
from nblaunch.host import proc
from nblaunch.launcher.attempt import RunningAttempt
from nblaunch.launcher.requests import JobRequests
from nblaunch.wire.argument_paths import ArgPath
from nblaunch.wire.board import Slot

TERM_GRACE_S = 1.0
"""Seconds from SIGTERM to SIGKILL. SIGTERM already ends a worker that does not handle it."""

COLLECT_S = 0.3
"""How long other ranks can report their own failures after the first one, before any rank is signalled."""

UNRESPONSIVE_GRACE_S = 0.7
"""Grace period after a failure for workers that have not noticed their SIGINT. They are blocked in C code, mostly in a
collective that will never end, and run no ``finally`` block."""

_STALL_S = 5.0
"""How long a rank may go without writing to its outbox while some rank has not returned."""

Steps = tuple[tuple[float, int], ...]
"""(seconds since the beginning, signal) pairs, in order."""


@dataclass
class Escalation:
    """Decides which signal each rank gets, and when.

    Args:
        began_s: ``time.monotonic()`` when it began.
        steps: for ranks whose Python code noticed SIGINT.
        unresponsive_steps: for all other ranks.
    """

    began_s: float
    steps: Steps
    unresponsive_steps: Steps
    _taken: dict[int, int] = field(default_factory=dict)
    _postponed_s: dict[int, float] = field(default_factory=dict)

    @classmethod
    def after_interrupt(cls, now_s: float, grace_s: float, patience_s: float = 0.0) -> Escalation:
        """Return the escalation after a user's interrupt: SIGINT after ``patience_s``, then the full grace period for
        all ranks.
        """
        steps = _from_interrupt(patience_s, grace_s)
        return cls(now_s, steps, steps)

    @classmethod
    def after_failure(cls, now_s: float, grace_s: float) -> Escalation:
        """Return the escalation that follows a rank's failure.

        No signal is sent for ``COLLECT_S``, so that other ranks can report their own failures. SIGINT is sent
        next. Ranks that notice it get the full grace period; ranks blocked in C code get at most
        ``UNRESPONSIVE_GRACE_S``.
        """
        return cls(
            now_s,
            _from_interrupt(COLLECT_S, grace_s),
            _from_interrupt(COLLECT_S, min(grace_s, UNRESPONSIVE_GRACE_S)),
        )

    @classmethod
    def kill(cls, now_s: float) -> Escalation:
        """Return an escalation that sends SIGKILL at once."""
        steps = ((0.0, signal.SIGKILL),)
        return cls(now_s, steps, steps)

    def begin_now(self, now_s: float) -> None:
        """Send the first signal now instead of later."""
        self.began_s = min(self.began_s, now_s - self.steps[0][0])

    def add_interrupt(self, now_s: float) -> None:
        """Record a user's interrupt that arrives while ranks are being stopped, for example after a failure.

        SIGINT is sent again to all ranks that have not received SIGTERM yet. Later signals are not delayed.
        """
        self.begin_now(now_s)
        self._taken = {rank: 0 if taken == 1 else taken for rank, taken in self._taken.items()}

    def postpone(self, now_s: float, ranks: Iterable[int]) -> None:
        """Delay the remaining steps of ``ranks``: count their times from now."""
        self._postponed_s.update(dict.fromkeys(ranks, now_s))

    def due(
        self, now_s: float, alive: Iterable[int], noticed: Callable[[int], bool]
    ) -> list[tuple[int, int]]:
        """Return the (rank, signal) pairs to send now. Each step of each rank is returned once."""
        signals = []
        for rank in alive:
            for at_s, signum in self._pending(rank, noticed):
                if self._began_s(rank) + at_s > now_s:
                    break
                signals.append((rank, signum))
                self._taken[rank] = self._taken.get(rank, 0) + 1
        return signals

    def next_s(self, alive: Iterable[int], noticed: Callable[[int], bool]) -> float | None:
        """Return the time at which the next step of any rank is due; None if no step is left."""
        pending = {rank: steps for rank in alive if (steps := self._pending(rank, noticed))}
        return min((self._began_s(rank) + steps[0][0] for rank, steps in pending.items()), default=None)

    def _began_s(self, rank: int) -> float:
        return self._postponed_s.get(rank, self.began_s)

    def _pending(self, rank: int, noticed: Callable[[int], bool]) -> Steps:
        steps = self.steps if noticed(rank) else self.unresponsive_steps
        return steps[self._taken.get(rank, 0) :]


def _from_interrupt(first_s: float, grace_s: float) -> Steps:
    term_s = first_s + grace_s
    return (first_s, signal.SIGINT), (term_s, signal.SIGTERM), (term_s + TERM_GRACE_S, signal.SIGKILL)


LISTEN_S = 2.0
"""How long ranks may take to reach their first check of ``should_stop``: a few steps of most loops."""


class Termination:
    """An orderly end of the workers. Call ``poll`` until they have ended.

    Args:
        requests: requests to the job, to which the stop and later the interrupt are added.
        now_s: ``time.monotonic()``.
        grace_s: seconds in which ranks may save a checkpoint and return.
        pids: rank -> process of the ranks whose function is running.
        slots: rank -> its slot on the board.
    """

    def __init__(
        self,
        requests: JobRequests,
        now_s: float,
        grace_s: float,
        pids: Mapping[int, int],
        slots: Mapping[int, Slot],
    ) -> None:
        self._requests = requests
        self._began_s = now_s
        self._grace_s = grace_s
        self._slots = slots
        self._begun: set[int] = set()  # ranks
        self._handling: set[int] = set()  # ranks that have received SIGTERM
        self._signal(pids)
        requests.stop()

    def poll(self, now_s: float, pids: Mapping[int, int]) -> str:
        """Interrupt the ranks once their time has run out, and return a note; otherwise return an empty string.

        ``pids`` may change, because ranks start and set their handlers at different times. After an interrupt, from
        this class or elsewhere, this method does nothing, because a second interrupt would kill the ranks.
        """
        if self._requests.interrupts:
            return ""
        self._signal(pids)
        is_handled = bool(self._handling) or any(self._slots[rank].num_checks > 0 for rank in self._begun)
        patience_s = self._grace_s if is_handled else min(self._grace_s, LISTEN_S)
        if now_s - self._began_s < patience_s:
            return ""
        self._requests.interrupt()
        if is_handled:
            return (
                f"ranks did not end within {self._grace_s:g} s after SIGTERM, so they are being interrupted"
            )
        return "no rank checks accelerator.should_stop or handles SIGTERM, so ranks are being interrupted"

    def _signal(self, pids: Mapping[int, int]) -> None:
        """Send SIGTERM once to each rank that has a handler."""
        self._begun.update(pids)
        others = {rank: pid for rank, pid in pids.items() if rank not in self._handling}
        self._handling.update(_signal_handling(signal.SIGTERM, others))


def pass_on(signum: int, pids: Mapping[int, int]) -> str:
    """Send a signal that the launcher received to the ranks that handle it; return a note.

    Args:
        signum: the signal, which has no meaning for the launcher.
        pids: rank -> process of the ranks whose function is running.
    """
    name, handling = signal.Signals(signum).name, _signal_handling(signum, pids)
    if not handling:
        return f"{name} received: no rank has a handler for it, so it has no effect"
    return f"{name} received: sent to {formatting.ranks(handling)}"


def _signal_handling(signum: int, pids: Mapping[int, int]) -> list[int]:
    """Send a signal to the ranks that have a handler for it; return these ranks."""
    handling = [rank for rank, pid in sorted(pids.items()) if proc.catches(pid, signum)]
    for rank in handling:
        # Do not signal its group, because its data loader processes have no handler.
        with suppress(ProcessLookupError):
            os.kill(pids[rank], signum)
    return handling


class SendingRanks:
    """Finds the ranks of an attempt that are still sending results after an interrupt.

    Args:
        running: the workers of the attempt.
        report: report of the attempt, which the caller updates.
    """

    def __init__(self, running: RunningAttempt, report: AttemptReport) -> None:
        self._running = running
        self._report = report
        self._outboxes = {
            assignment.rank: assignment.outbox_fd
            for assignment in running.assignments
            if assignment.outbox_fd >= 0  # otherwise the rank has nothing to send
        }
        self._sizes: dict[int, tuple[int, float]] = {}
        """Rank -> size of its outbox in bytes, and the time at which the outbox reached this size."""
        self._since_s: float | None = None
        self._is_noted = False

    def find(self, alive: Collection[int]) -> set[int]:
        """Return the ranks among ``alive`` that are still sending and do not seem to be blocked."""
        now = time.monotonic()
        announced = self._report.announced
        sending = {
            rank for rank in self._outboxes.keys() & set(alive) if self._is_sending(rank, announced.get(rank))
        }
        if not (sending and self._have_all_returned(alive)):
            sending = {rank for rank in sending if self._writes(rank, now)}
        self._since_s = (self._since_s or now) if sending else None
        return sending

    def describe_wait(self, sending: Collection[int], grace_s: float) -> str:
        """Return one note, after ``grace_s``, on what an interrupted job is waiting for; otherwise an empty string."""
        if self._is_noted or self._since_s is None or time.monotonic() - self._since_s < grace_s:
            return ""
        self._is_noted = True
        return (
            f"interrupted; values or weights from {formatting.ranks(sorted(sending))} are still on their way. A second "
            "interrupt ends the wait and loses the rest"
        )

    def _is_sending(self, rank: int, announced: Sequence[ArgPath] | None) -> bool:
        report = self._report
        if announced is not None:
            return len(report.sent_states.get(rank, ())) < len(announced)
        return rank not in report.failed and self._is_finishing(rank)

    def _is_finishing(self, rank: int) -> bool:
        """Return whether the function has ended and the rank has not yet announced what it will send."""
        return self._running.board.slot(rank).state is WorkerState.FINISHING

    def _have_all_returned(self, alive: Collection[int]) -> bool:
        report = self._report
        if self._running.attempt.peers is not None or report.failed or report.interruptions:
            return False
        return all(
            rank in report.returned or (rank in alive and self._is_finishing(rank))
            for rank in self._running.attempt.ranks
        )

    def _writes(self, rank: int, now_s: float) -> bool:
        size = os.fstat(self._outboxes[rank]).st_size
        if size != self._sizes.get(rank, (-1, 0.0))[0]:
            self._sizes[rank] = (size, now_s)
        return now_s - self._sizes[rank][1] < _STALL_S
