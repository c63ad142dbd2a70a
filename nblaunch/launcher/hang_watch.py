"""HangWatch finds ranks that make no progress, reports where they are, and answers queries about positions.

    progress ──> HangDetector ── needs stacks ──> StackQuery ── poll ──> HangDetector ──> notes, Stalled, hang
    query ──────────────────────────────────────> StackQuery ── poll ──> reply
    threads ──> WaitDetector ───── needs stacks ─> StackQuery ── poll ──> note, Stalled, hang
    finished ranks ─────────────── needs stacks ─> StackQuery ── poll ──> note, Stalled, hang

``diagnosis/hang.py`` defines a hang. Ranks on this machine answer through signals and files (:class:`LocalStacks`), and
ranks on other machines through their nodes (``engines/coordinator.py``).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from nblaunch import formatting
from nblaunch.diagnosis import hang, long_waits
from nblaunch.diagnosis.disagreements import Explanation, explain, explain_splits, find_disagreement
from nblaunch.diagnosis.hang import (
    Check,
    Finding,
    HangDetector,
    cause,
    describe_hang,
    describe_positions,
    progress_of,
)
from nblaunch.diagnosis.long_waits import WaitDetector, WaitKind
from nblaunch.diagnosis.report import LEFT, Hang, how_left
from nblaunch.diagnosis.stacks import Position, StackDump
from nblaunch.diagnosis.stalls import Standing, explain_stall, waits_for_finished
from nblaunch.events import Event, Metric, Note, Returned, Stalled, WorkerState
from nblaunch.host import proc
from nblaunch.launcher.attempt import Attempt
from nblaunch.launcher.requests import JobRequests, Query
from nblaunch.wire.board import SlotReading
from nblaunch.wire.collective_calls import RankCalls

Positions = Mapping[int, Position]


@dataclass(frozen=True)
class Hung:
    """A confirmed hang.

    Args:
        positions: positions of the ranks.
        lines: its description.
        advice: what to check, if the description does not already say so.
        explanation: explanation from the ranks' recorded collectives; None if there is none.
    """

    positions: Positions
    lines: Sequence[str]
    advice: str
    explanation: Explanation | None = None

    def reported(self, running: Sequence[int]) -> Hang:
        """Return the hang in the form that the attempt's report needs.

        Args:
            running: ranks whose function is running, at least one.
        """
        explanation = self.explanation
        ranks, headline = (
            (explanation.ranks, explanation.headline) if explanation else cause(self.positions, running)
        )
        return Hang(ranks, headline, tuple(self.lines), self.advice, is_explained=explanation is not None)


class StackQuery(Protocol):
    """A query for the stacks of ranks. ``poll`` it until :attr:`is_done`; it never blocks."""

    @property
    def is_done(self) -> bool:
        """Whether no more replies are expected."""

    def poll(self) -> None:
        """Look for replies."""

    def checks(self) -> dict[int, Check]:
        """Return each rank's position, and its processor time so far."""


class LocalStacks:
    """A query for the stacks of this machine's ranks. Implements :class:`StackQuery`.

    Args:
        attempt: attempt whose log folder has the stack files.
        pids: rank -> process.
    """

    def __init__(self, attempt: Attempt, pids: Mapping[int, int]) -> None:
        self._pids = pids
        paths = {rank: attempt.log.stacks_path(rank, attempt.number) for rank in attempt.ranks}
        self._dump = StackDump(pids, paths)
        self.poll = self._dump.poll

    @property
    def is_done(self) -> bool:
        """Whether all ranks have answered, or their time has run out."""
        return self._dump.is_done

    def checks(self) -> dict[int, Check]:
        """Return each rank's position, and its processor time so far."""
        posix_session_s = proc.posix_session_cpu_seconds(self._pids.values())
        positions = self._dump.positions()
        return {
            # 0 means unreadable.
            rank: Check(positions[rank], proc.main_thread_cpu_seconds(pid), posix_session_s[pid] or None)
            for rank, pid in self._pids.items()
        }


_LEFT_S = 2.0
"""How long, in seconds, other ranks must have been waiting for a finished rank before this is reported; ranks also wait
briefly while they form a smaller group.
"""

_MAX_PAUSE_S = 16.0

_Use = Callable[[Mapping[int, Check], Collection[int]], Hung | None]
"""Handles the requested stacks. Arguments: a mapping rank -> check, and the ranks that have finished."""


class HangWatch:
    """Watches the progress of one attempt's ranks. Never blocks.

    Args:
        attempt: the attempt to watch.
        read_board: returns the readings of all ranks.
        requests: the job's requests; this object answers their queries about stacks.
        emit: receives notes and events.
        ask_ranks: asks ranks (rank -> process) for their stacks; None = the ranks run on this machine.
        read_calls: returns the last collectives of this machine's ranks, by rank.
    """

    def __init__(
        self,
        attempt: Attempt,
        read_board: Callable[[], Sequence[SlotReading]],
        requests: JobRequests,
        emit: Callable[[Event], None],
        ask_ranks: Callable[[Mapping[int, int]], StackQuery] | None = None,
        read_calls: Callable[[], Mapping[int, RankCalls]] = dict,
    ) -> None:
        self._attempt = attempt
        self._read_board = read_board
        self._read_calls = read_calls
        self._requests = requests
        self._emit = emit
        self._is_local = ask_ranks is None
        self._ask_ranks = ask_ranks or partial(LocalStacks, attempt)
        self._num_messages = Counter[int]()
        self._num_metrics = Counter[int]()
        self._ways_left: dict[int, str] = {}
        self._queries: list[tuple[StackQuery, _Use]] = []
        self._wait_detector = WaitDetector()
        self._waits: dict[int, tuple[WaitKind, Position]] = {}
        self._left_alone: Positions = {}
        self._next_look_s, self._pause_s = math.inf, 0.0
        self.begin_anew()

    @property
    def is_asking(self) -> bool:
        """Whether a query for stacks is pending."""
        return bool(self._queries)

    def begin_anew(self) -> None:
        """Reset the progress clock of every rank."""
        timeout_s = self._attempt.spec.hang_timeout_s
        self._detector = HangDetector(math.inf if timeout_s is None else timeout_s)

    def count(self, rank: int, event: Event) -> None:
        """Count a rank's event. Logged values count as progress, but output does not."""
        counts = self._num_metrics if isinstance(event, Metric) else self._num_messages
        counts[rank] += 1
        if isinstance(event, Returned):
            self._ways_left[rank] = how_left(event, is_script=self._attempt.spec.is_script)

    def inspect(self, readings: Sequence[SlotReading], pids: Mapping[int, int]) -> None:
        """Check the progress of all ranks. Called a few times per second.

        Args:
            readings: readings of the board.
            pids: rank -> process, for ranks whose function is running or that are still sending their weights and
                optimizer states. These are the ranks on all machines if nodes are asked, and otherwise the ranks on
                this machine.
        """
        now = time.monotonic()
        progress = {
            reading.rank: progress_of(
                now, reading, self._num_metrics[reading.rank], self._num_messages[reading.rank]
            )
            for reading in readings
        }
        if self._detector.observe(now, progress, list(pids)):
            self._ask(pids, self._judge)
        if self._is_local and (kinds := self._wait_detector.observe(now, pids)):
            self._ask(pids, partial(self._report_waits, kinds=kinds))
        # In a session, a command may interrupt waiting ranks, so only the time limit counts as evidence of a hang.
        if self._is_local and not self._attempt.spec.is_session:
            done = {reading.rank for reading in readings if reading.state is WorkerState.DONE}
            self._look_for_left_alone(now, pids, (done | self._ways_left.keys()) - pids.keys())

    def ask(self, query: Query, pids: Mapping[int, int]) -> None:
        """Answer a query about the positions of all ranks once their stacks have arrived; ``pids`` as in
        :meth:`inspect`."""
        self._ask(pids, partial(self._answer, query=query))

    def poll(self, done: Collection[int]) -> Hung | None:
        """Handle complete stacks; return the last hang that they confirm.

        Args:
            done: ranks that have finished.
        """
        hung = None
        for asked, use in list(self._queries):
            asked.poll()
            if asked.is_done:
                self._queries.remove((asked, use))
                hung = use(asked.checks(), done) or hung
        return hung

    def _ask(self, pids: Mapping[int, int], use: _Use) -> None:
        self._queries.append((self._ask_ranks(pids), use))

    def _answer(self, checks: Mapping[int, Check], done: Collection[int], query: Query) -> None:
        positions = _positions(checks)
        is_hang = positions.keys() <= self._detector.still_for(time.monotonic()).keys()
        if is_hang:
            lines = _with_headline(*self._describe(positions, done))
        else:
            lines = describe_positions(positions)
        self._requests.answer(query, "\n".join(lines) or "no rank is running the function")

    def _report_waits(
        self, checks: Mapping[int, Check], done: Collection[int], kinds: Mapping[int, WaitKind]
    ) -> Hung | None:
        """Report ranks that are waiting for a thread or for a reader of a queue; return the hang if it is certain.

        Args:
            kinds: rank -> what it is waiting for, unless its stack shows otherwise.
        """
        positions = _positions(checks)
        waiting = {
            rank: (kind, positions[rank])
            for rank, kind in kinds.items()
            if rank in positions and long_waits.is_confirmed(kind, positions[rank])
        }
        if not waiting:
            return None
        self._waits |= waiting
        new_kinds = {kind for kind, _ in waiting.values()}
        for_s = int(min(kind.value for kind in new_kinds))
        for rank, (_, at) in waiting.items():
            self._emit(Stalled(rank, where=at.place, for_s=for_s))
        lines, explanation = self._describe(positions, done)
        self._report(f"no progress for {for_s} s:", _with_headline(lines, explanation))
        return Hung(positions, lines, "", explanation) if WaitKind.THREAD in new_kinds else None

    def _look_for_left_alone(self, now_s: float, pids: Mapping[int, int], done: Collection[int]) -> None:
        """Request the stacks of the remaining ranks at increasing intervals, because these ranks may not need the
        finished ones at all.
        """
        if not pids or not done:
            self._pause_s = 0.0  # all ranks are running, or none
        elif not self._pause_s:
            self._pause_s, self._next_look_s = _LEFT_S, now_s + _LEFT_S
        elif now_s >= self._next_look_s:
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
            self._next_look_s = now_s + self._pause_s
            self._ask(pids, self._report_left_alone)

    def _report_left_alone(self, checks: Mapping[int, Check], done: Collection[int]) -> Hung | None:
        """Report ranks that are waiting for a finished rank, if they were in the same place when their stacks were last
        requested.
        """
        now, positions, before = time.monotonic(), _positions(checks), self._left_alone
        standing = Standing(self._read_calls(), self._left(done), positions)
        self._left_alone = positions if waits_for_finished(standing) else {}
        if self._left_alone != before:
            self._next_look_s = now + _LEFT_S
        is_certain = bool(before) and self._left_alone == before
        if not is_certain or not self._detector.mark_reported(positions):
            return None
        for rank, at in positions.items():
            self._emit(Stalled(rank, where=at.place, waiting_in=at.waiting_in, for_s=_LEFT_S))
        lines, explanation = self._describe(positions, done)
        self._report(f"no progress for {_LEFT_S:g} s:", _with_headline(lines, explanation))
        return Hung(positions, lines, explanation.advice if explanation else "", explanation)

    def _left(self, done: Collection[int]) -> dict[int, str]:
        """Return how each finished rank left the function."""
        return {rank: self._ways_left.get(rank, LEFT) for rank in sorted(done)}

    def _judge(self, checks: Mapping[int, Check], done: Collection[int]) -> Hung | None:
        """Report what the detector finds in the requested stacks; return the hang if it is certain."""
        now, positions = time.monotonic(), _positions(checks)
        finding = self._detector.judge(now, checks)
        for rank, for_s in self._detector.still_for(now).items():
            at = positions.get(rank)
            is_named = finding is not None and rank in (*finding.hung, *finding.suspected)
            if at is not None and (at.waits_for_ranks or is_named):
                is_certain = at.waits_for_ranks or (finding is not None and rank in finding.hung)
                waiting_in = at.waiting_in if at.waits_for_ranks else ""
                self._emit(
                    Stalled(rank, where=at.place, waiting_in=waiting_in, for_s=for_s, is_certain=is_certain)
                )
        if finding is None:
            return None
        lines, explanation = self._describe(positions, done, finding.busy)
        self._report(self._headline(finding), _with_headline(lines, explanation))
        is_full = WaitKind.READER in self._still_waiting(positions).values()
        advice = "" if is_full else hang.advice(positions)
        if explanation is not None:
            advice = explanation.advice
        return Hung(positions, lines, advice, explanation) if finding.hung else None

    def _still_waiting(self, positions: Positions) -> dict[int, WaitKind]:
        """Return the ranks that are still waiting where they were reported to be, and what they are waiting for."""
        return {rank: kind for rank, (kind, at) in self._waits.items() if positions.get(rank) == at}

    def _describe(
        self, positions: Positions, done: Collection[int], busy: Sequence[int] = ()
    ) -> tuple[list[str], Explanation | None]:
        """Return the positions of ranks, what they mean, and the explanation from recorded collectives."""
        steps = {reading.rank: reading.step for reading in self._read_board()}
        left = self._left(done)
        explanation = self._explain(positions, left, steps)
        lines = describe_hang(positions, steps, gone=left, busy=busy, is_explained=explanation is not None)
        start_method = self._attempt.plan.start_method
        still = self._still_waiting(positions)
        if blocked := [rank for rank, kind in still.items() if kind is WaitKind.READER]:
            return [*lines, long_waits.explain_full_queues(blocked)], None
        if still:
            waiting = {rank: positions[rank] for rank in still}
            lines += [*long_waits.explain(waiting), long_waits.advice(start_method)]
        elif start_method == "fork":
            lines += long_waits.explain_threads_of_libraries(positions.values())
        return lines, explanation

    def _explain(
        self, positions: Positions, left: Mapping[int, str], steps: Mapping[int, int]
    ) -> Explanation | None:
        calls = self._read_calls()
        if (disagreement := find_disagreement(calls)) is not None and not disagreement.of_rates:
            return explain(disagreement, calls, steps)
        if (splits := explain_splits(calls)) is not None:
            return splits
        return explain_stall(Standing(calls, left, positions, steps))

    def _report(self, headline: str, lines: Sequence[str]) -> None:
        self._emit(Note.of_job("\n".join([headline, *(f"    {line}" for line in lines)]), "hang"))

    def _headline(self, finding: Finding) -> str:
        timeout_s = self._detector.timeout_s
        if finding.hung:
            return f"no progress for {timeout_s:g} s:"
        have = "has" if len(finding.suspected) == 1 else "have"
        return (
            f"{formatting.ranks(finding.suspected)} {have} shown no step, collective or progress bar for "
            f"{timeout_s:g} s. This may be a hang, or work that has no steps (use tqdm or accelerator.progress "
            "to show its progress):"
        )


def _positions(checks: Mapping[int, Check]) -> Positions:
    return {rank: check.position for rank, check in checks.items()}


def _with_headline(lines: list[str], explanation: Explanation | None) -> list[str]:
    """Return lines about a hang, with the explanation first."""
    return lines if explanation is None else [f"{explanation.headline}.", *lines]
