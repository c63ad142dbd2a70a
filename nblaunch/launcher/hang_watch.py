"""HangWatch: finds ranks without progress, reports where they are, and answers where all ranks are.

    progress ──> HangDetector ── needs stacks ──> StackDump ── poll ──> HangDetector ──> notes, Stalled, hang
    query ──────────────────────────────────────> StackDump ── poll ──> answer
    threads ──> DeadlockDetector ─ needs stacks ─> StackDump ── poll ──> note, Stalled, hang
    pipes ────> full_queues ────── needs stacks ─> StackDump ── poll ──> note

What counts as a hang is in ``diagnosis/hang.py``.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from nblaunch import formatting
from nblaunch.diagnosis import deadlock, full_queues
from nblaunch.diagnosis.deadlock import DeadlockDetector
from nblaunch.diagnosis.full_queues import FullQueueDetector
from nblaunch.diagnosis.hang import (
    BUSY_FOR_LONG,
    Check,
    Finding,
    HangDetector,
    describe_hang,
    describe_positions,
    progress_of,
)
from nblaunch.diagnosis.stacks import Position, StackDump
from nblaunch.events import Event, Metric, Note, Stalled
from nblaunch.host import proc
from nblaunch.launcher import fork_safety
from nblaunch.launcher.attempt import RunningAttempt
from nblaunch.launcher.requests import JobRequests, Query
from nblaunch.wire.board import SlotReading

Positions = Mapping[int, Position]


@dataclass(frozen=True)
class Hung:
    """A certain hang.

    Args:
        positions: of the ranks.
        lines: its description.
        advice: what to look for, where the description does not say it.
    """

    positions: Positions
    lines: Sequence[str]
    advice: str


_Use = Callable[[Positions, Collection[int]], Hung | None]
"""What is done with stacks: gets the positions of ranks, and the ranks that have nothing more to do."""


class HangWatch:
    """Watches the progress of the ranks of one attempt. Never blocks.

    Args:
        running: the attempt.
        requests: whose queries about stacks are answered.
        emit: receives what is found.
    """

    def __init__(self, running: RunningAttempt, requests: JobRequests, emit: Callable[[Event], None]) -> None:
        self._attempt = running.attempt
        self._board = running.board
        self._requests = requests
        self._emit = emit
        self._num_messages = Counter[int]()
        self._num_metrics = Counter[int]()
        self._dumps: list[tuple[StackDump, _Use]] = []
        self._deadlocks = DeadlockDetector()
        self._deadlocked: dict[int, Position] = {}
        self._full_queues = FullQueueDetector()
        self._blocked: dict[int, Position] = {}
        self.begin_anew()

    @property
    def is_asking(self) -> bool:
        """Whether ranks have been asked for their stacks."""
        return bool(self._dumps)

    def begin_anew(self) -> None:
        """Take it that all ranks make progress now."""
        timeout_s = self._attempt.spec.hang_timeout_s
        self._detector = HangDetector(math.inf if timeout_s is None else timeout_s)

    def count(self, rank: int, event: Event) -> None:
        """Count an event of a rank; values that it logs are progress, what it prints is none."""
        counts = self._num_metrics if isinstance(event, Metric) else self._num_messages
        counts[rank] += 1

    def inspect(self, readings: Sequence[SlotReading], pids: Mapping[int, int]) -> None:
        """Look at the progress of all ranks. Called a few times a second.

        Args:
            readings: of the board.
            pids: rank -> process, of the ranks of this machine whose function runs, or that still send states.
        """
        now = time.monotonic()
        progress = {
            reading.rank: progress_of(
                now, reading, self._num_metrics[reading.rank], self._num_messages[reading.rank]
            )
            for reading in readings
        }
        if self._detector.observe(now, progress, list(pids)):
            self._dump_stacks(pids, partial(self._judge, pids=pids))
        if deadlocked := self._deadlocks.observe(now, pids):
            self._dump_stacks(pids, partial(self._report_deadlock, deadlocked=deadlocked))
        if blocked := self._full_queues.observe(now, pids):
            self._dump_stacks(pids, partial(self._report_full_queues, blocked=blocked))

    def ask(self, query: Query, pids: Mapping[int, int]) -> None:
        """Answer a query where all ranks are, when their stacks are there; ``pids`` as in :meth:`inspect`."""
        self._dump_stacks(pids, partial(self._answer, query=query))

    def poll(self, done: Collection[int]) -> Hung | None:
        """Handle stacks that are complete; return the last certain hang that they show.

        Args:
            done: ranks that have nothing more to do.
        """
        hung = None
        for dump, use in list(self._dumps):
            dump.poll()
            if dump.is_done:
                self._dumps.remove((dump, use))
                hung = use(dump.positions(), done) or hung
        return hung

    def _dump_stacks(self, pids: Mapping[int, int], use: _Use) -> None:
        log, number = self._attempt.log, self._attempt.number
        paths = {rank: log.stacks_path(rank, number) for rank in self._attempt.ranks}
        self._dumps.append((StackDump(pids, paths), use))

    def _answer(self, positions: Positions, done: Collection[int], query: Query) -> None:
        is_hang = positions.keys() <= self._detector.still_for(time.monotonic()).keys()
        lines = self._describe(positions, done) if is_hang else describe_positions(positions)
        self._requests.answer(query, "\n".join(lines) or "no rank runs the function at the moment")

    def _report_deadlock(
        self, positions: Positions, done: Collection[int], deadlocked: Mapping[int, bool]
    ) -> Hung | None:
        """Report ranks that wait for ever. One that waits in a collective waits for ranks, whatever its threads do.

        Args:
            deadlocked: rank -> whether that is certain without its stack.
        """
        waiting = {
            rank: positions[rank]
            for rank, is_certain in deadlocked.items()
            if rank in positions and positions[rank].stack and not positions[rank].waits_for_ranks
            if is_certain or deadlock.is_confirmed(positions[rank])
        }
        if not waiting:
            return None
        self._deadlocked.update(waiting)
        for rank, at in waiting.items():
            self._emit(Stalled(rank, time.time(), at.place, "", deadlock.CERTAIN_S))
        lines = self._describe(positions, done)
        self._report(f"no progress for {deadlock.CERTAIN_S:g} s:", lines)
        is_certain = any(deadlocked[rank] for rank in waiting)
        return Hung(positions, lines, "") if is_certain else None

    def _report_full_queues(
        self, positions: Positions, done: Collection[int], blocked: Collection[int]
    ) -> Hung | None:
        """Report ranks that wait for room in a queue of this process; another process may still read it."""
        waiting = {
            rank: positions[rank]
            for rank in blocked
            if rank in positions and full_queues.is_confirmed(positions[rank])
        }
        self._blocked.update(waiting)
        for rank, at in waiting.items():
            self._emit(Stalled(rank, time.time(), at.place, "", full_queues.LONG_S))
        if waiting:
            self._report(f"no progress for {full_queues.LONG_S:g} s:", self._describe(positions, done))
        return None

    def _judge(self, positions: Positions, done: Collection[int], pids: Mapping[int, int]) -> Hung | None:
        """Report what the detector finds in the stacks that it wanted; return it where it is a hang for certain."""
        now = time.monotonic()
        finding = self._detector.judge(now, _checks(pids, positions))
        for rank, for_s in self._detector.still_for(now).items():
            at = positions.get(rank)
            is_named = finding is not None and rank in (*finding.hung, *finding.suspected)
            if at is not None and (at.waits_for_ranks or is_named):
                is_certain = at.waits_for_ranks or (finding is not None and rank in finding.hung)
                waiting_in = at.waiting_in if at.waits_for_ranks else ""
                self._emit(Stalled(rank, time.time(), at.place, waiting_in, for_s, is_certain))
        if finding is None:
            return None
        lines = self._describe(positions, done, finding.busy)
        self._report(self._headline(finding), lines)
        advice = "" if self._still_blocked(positions) else BUSY_FOR_LONG
        return Hung(positions, lines, advice) if finding.hung else None

    def _still_blocked(self, positions: Positions) -> list[int]:
        """Return the ranks that wait for room in a queue, as before."""
        return [rank for rank, at in self._blocked.items() if positions.get(rank) == at]

    def _describe(self, positions: Positions, done: Collection[int], busy: Sequence[int] = ()) -> list[str]:
        steps = {reading.rank: reading.step for reading in self._board.read()}
        lines = describe_hang(positions, steps, gone=sorted(done), busy=busy)
        start_method = self._attempt.plan.start_method
        if blocked := self._still_blocked(positions):
            return [*lines, full_queues.explain(blocked)]
        deadlocked = {rank: at for rank, at in self._deadlocked.items() if positions.get(rank) == at}
        if deadlocked:
            lines += [*deadlock.explain(deadlocked), deadlock.advice(start_method)]
        elif start_method == "fork":
            lines += fork_safety.explain_hang(list(positions.values()))
        return lines

    def _report(self, headline: str, lines: Sequence[str]) -> None:
        self._emit(Note.of_job("\n".join([headline, *(f"    {line}" for line in lines)]), "hang"))

    def _headline(self, finding: Finding) -> str:
        timeout_s = self._detector.timeout_s
        if finding.hung:
            return f"no progress for {timeout_s:g} s:"
        have = "has" if len(finding.suspected) == 1 else "have"
        return (
            f"{formatting.ranks(finding.suspected)} {have} shown no step, collective or bar for {timeout_s:g} s. This "
            "may be a hang, or work without steps (tqdm or accelerator.progress around it would show that it moves):"
        )


def _checks(pids: Mapping[int, int], positions: Positions) -> dict[int, Check]:
    posix_session_s = proc.posix_session_cpu_seconds(pids.values())
    return {
        # 0 means that it can't be read.
        rank: Check(positions[rank], proc.main_thread_cpu_seconds(pid), posix_session_s[pid] or None)
        for rank, pid in pids.items()
        if rank in positions
    }
