"""Compares the collectives that ranks record, and finds ranks whose calls differ while they are running.

    digests of the last calls, several times a second ── differ? ──> all calls ──> Disagreement, twice ──> report
                                                                              all calls at the end ──┘

A check compares a few numbers per rank, and takes at most a hundredth of the launcher's time for any number of ranks.
The ranks are on this machine, or on all nodes of an engine (``engines/collectives.py``). Ranks may write during a
check, so a difference counts only if the next check confirms it. Ranks that have not reached the call yet get a moment
to do so, because the majority decides which rank is at fault; a rank that arrives while the job is ending is still
included.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

from nblaunch import env
from nblaunch.diagnosis.disagreements import (
    Disagreement,
    Explanation,
    completed,
    explain,
    explain_splits,
    find_disagreement,
)
from nblaunch.diagnosis.report import AttemptReport
from nblaunch.diagnosis.stalls import Standing, explain_stall
from nblaunch.events import Event, Note
from nblaunch.launcher.attempt import Attempt, RunningAttempt
from nblaunch.wire.collective_calls import NUM_CALLS, RankCalls

_NUM_CALLS = 16
"""Number of calls per rank that a check compares."""

_NUM_FULL = 10
"""One in this many checks compares all calls, because ranks may be far apart."""

_MAX_SHARE = 0.01
"""Maximum share of the launcher's time that checks may take."""

_STANDS_STILL_S = 3.0
"""If no rank has made a call for this long before an interrupt, a warning says what the ranks were waiting for."""

_PATIENCE_S = 2.0
"""Time for ranks to reach the call in which others differ."""


class CallSource(Protocol):
    """Source of the ranks' recorded collectives."""

    def may_differ(self) -> bool:
        """Return whether digests of ranks differ; False at once if there were no calls since the last check."""

    def read(self) -> Mapping[int, RankCalls] | None:
        """Return the calls that each rank has recorded so far; None while they are in transit."""

    def last(self) -> Mapping[int, RankCalls]:
        """Return the calls that have arrived."""

    def steps(self) -> Mapping[int, int]:
        """Return how many batches each rank's current loop over a prepared loader has taken."""


class BoardCalls:
    """Calls of this machine's ranks. Implements :class:`CallSource`.

    Args:
        running: the attempt.
    """

    def __init__(self, running: RunningAttempt) -> None:
        self._board = running.board
        self._ranks = running.attempt.ranks
        self._num_looks = 0
        self._num_calls: list[int] = []

    def may_differ(self) -> bool:
        """Return whether digests of ranks differ; False at once if there were no calls since the last check."""
        readers = [self._board.calls(rank) for rank in self._ranks]
        counts = [reader.num_calls for reader in readers]
        if counts == self._num_calls:
            return False
        self._num_calls = counts
        self._num_looks += 1
        limit = NUM_CALLS if self._num_looks % _NUM_FULL == 0 else _NUM_CALLS
        common: dict[tuple[int, int], float] = {}
        for reader in readers:
            for key, digest in reader.digests(limit).items():
                if common.setdefault(key, digest) != digest:
                    return True
        return False

    def read(self) -> dict[int, RankCalls]:
        """Return the last calls of each rank."""
        return {rank: self._board.calls(rank).read() for rank in self._ranks}

    last = read

    def steps(self) -> dict[int, int]:
        """Return how many batches each rank's current loop over a prepared loader has taken."""
        return {reading.rank: reading.step for reading in self._board.read()}


class CollectiveWatch:
    """Compares the collectives that the ranks of an attempt have recorded.

    Args:
        source: the recorded calls.
        attempt: attempt of the ranks.
        emit: receives notes in a session, whose commands continue.
        clock: returns the seconds on a clock that never jumps.

    Attributes:
        calls: returns, for each rank, the last of its collectives that have arrived.
    """

    def __init__(
        self,
        source: CallSource,
        attempt: Attempt,
        emit: Callable[[Event], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self.calls = source.last
        self._is_session = attempt.spec.is_session
        self._is_judge = attempt.compares_ranks
        self._emit = emit
        self._clock = clock
        self._next_s = 0.0
        self._is_reading = False
        self._found: tuple[Disagreement, float] | None = None
        self._known: set[object] = set()
        self._reported: Disagreement | None = None

    def compare(self, report: AttemptReport, running: Collection[int], end: Callable[[], None]) -> None:
        """Compare the ranks if a check is due.

        Args:
            report: receives the disagreement.
            running: ranks that may still reach a call.
            end: ends the job; called if the ranks certainly differ.
        """
        now_s = self._clock()
        is_ending = report.disagreement or report.hang or report.interrupted or report.cancelled
        if now_s < self._next_s or is_ending or not self._is_judge:
            return
        explanation = self._look(now_s, running)
        self._next_s = self._clock() + (self._clock() - now_s) / _MAX_SHARE
        if explanation is None or env.is_check_off(explanation.check):
            return
        if self._is_session:
            self._emit(Note.of_job(explanation.text, "warning"))
        else:
            report.disagreement = explanation
            end()

    def conclude(self, report: AttemptReport) -> None:
        """Compare the ranks again after all have stopped writing, and keep their last calls in ``report``."""
        report.calls = dict(self._source.last())
        if report.disagreement is not None and self._reported is not None:
            whole = completed(self._reported, report.calls)
            report.disagreement = explain(whole, report.calls, self._source.steps())
        is_over = report.disagreement is not None or report.interrupted or report.cancelled
        if is_over or self._is_session or not self._is_judge:
            return
        explanation = self._explain(report.calls)
        # A failed attempt is always explained.
        if explanation is not None and not (report.is_success and env.is_check_off(explanation.check)):
            report.disagreement = explanation

    def describe_wait(self, report: AttemptReport, interrupted_s: float | None = None) -> None:
        """Report what ranks were waiting for if they had been stuck for a while before the user's interrupt.

        Args:
            report: report of the attempt.
            interrupted_s: time of the interrupt, on the clock; None = now.
        """
        if not self._is_judge:
            return
        calls = self._source.last()
        last_s = max(
            (rank_calls.last.time_s for rank_calls in calls.values() if rank_calls.last is not None),
            default=math.inf,
        )
        if (self._clock() if interrupted_s is None else interrupted_s) - last_s < _STANDS_STILL_S:
            return
        standing = Standing(calls, report.ways_left, steps=self._source.steps())
        explanation = self._explain(calls) or explain_stall(standing)
        if explanation is not None:
            self._emit(
                Note.of_job(f"interrupted while ranks were waiting: {explanation.headline}", "warning")
            )

    def _explain(self, calls: Mapping[int, RankCalls]) -> Explanation | None:
        disagreement = find_disagreement(calls)
        if disagreement is None or self._key(disagreement) in self._known:
            return explain_splits(calls)
        return self._certain(disagreement, calls)

    def _look(self, now_s: float, alive: Collection[int]) -> Explanation | None:
        if self._found is None and not self._is_reading and not self._source.may_differ():
            return None
        calls = self._source.read()
        self._is_reading = calls is None
        if calls is None:
            return None
        disagreement = find_disagreement(calls)
        if disagreement is None or self._key(disagreement) in self._known:
            self._found = None
            return None
        if self._found is None or not _continues(self._found[0], disagreement):
            self._found = disagreement, now_s
        disagreement, since_s = completed(self._found[0], calls), self._found[1]
        self._found = disagreement, since_s
        may_come = disagreement.missing & set(alive)
        if now_s == since_s or (may_come and now_s - since_s < _PATIENCE_S):
            return None
        return self._certain(disagreement, calls)

    def _certain(self, disagreement: Disagreement, calls: Mapping[int, RankCalls]) -> Explanation:
        self._found, self._reported = None, disagreement
        self._known.add(self._key(disagreement))
        return explain(disagreement, calls, self._source.steps())

    @staticmethod
    def _key(disagreement: Disagreement) -> object:
        """Return a key that two occurrences of one mistake share: the calls that differ, and their lines."""
        calls = disagreement.calls.values()
        return disagreement.group, disagreement.of_rates, frozenset((call.site, call.size) for call in calls)


def _continues(earlier: Disagreement, later: Disagreement) -> bool:
    """Return whether a later check confirms a difference. Once ranks differ, they continue to differ.

    The first difference may no longer be recorded, because ranks call collectives faster than they are compared.
    """
    is_same = earlier.group == later.group and earlier.of_rates == later.of_rates
    return is_same and later.number >= earlier.number
