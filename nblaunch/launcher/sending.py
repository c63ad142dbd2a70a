"""Ranks that are still sending the results of their function when the user interrupts the job.

A first interrupt must not lose a value or weights. A rank is therefore not signalled between the end of its function
and its last :class:`nblaunch.events.StateSent`, whatever its code does in between, such as ``state_dict`` or
``__getstate__``:

    every rank has returned     the launcher waits without a limit; a second interrupt ends the wait
    some ranks have not         a sending rank may wait for them in a collective, so it must keep writing
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Sequence

from nblaunch import formatting
from nblaunch.diagnosis.report import AttemptReport
from nblaunch.events import WorkerState
from nblaunch.launcher.attempt import RunningAttempt
from nblaunch.wire.argument_paths import ArgPath

_STALL_S = 5.0
"""How long a rank may write nothing to its outbox while some rank has not returned."""


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
        """Rank -> bytes in its outbox, and the time at which they reached this number."""
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
        """Return a note, once after ``grace_s``, that says what the interrupted job waits for; empty otherwise."""
        if self._is_noted or self._since_s is None or time.monotonic() - self._since_s < grace_s:
            return ""
        self._is_noted = True
        return (
            f"interrupted; values or weights of {formatting.ranks(sorted(sending))} are still on their way. A second "
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
