"""HangWatch: finds ranks without progress, reports where they are, and answers where all ranks are.

    progress of all ranks ──> Watchdog ── needs stacks ──> StackDump ── poll ──> Watchdog ──> notes, Stalled, hang
    query ─────────────────────────────────────────────> StackDump ── poll ──> answer

What counts as a hang is in ``diagnosis/hang.py``.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from nblaunch import formatting
from nblaunch.diagnosis.hang import (
    Check,
    Finding,
    Watchdog,
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


class HangWatch:
    """Watches the progress of the ranks of one attempt. Never blocks.

    Args:
        running: the attempt.
        requests: whose queries about stacks are answered.
        emit: receives what is found.
        active_pids: returns rank -> process of the ranks whose function runs.
        done: returns the ranks that have nothing more to do.
    """

    def __init__(
        self,
        running: RunningAttempt,
        requests: JobRequests,
        emit: Callable[[Event], None],
        active_pids: Callable[[], dict[int, int]],
        done: Callable[[], set[int]],
    ) -> None:
        self._attempt = running.attempt
        self._board = running.board
        self._requests = requests
        self._emit = emit
        self._active_pids = active_pids
        self._done = done
        self._num_messages = Counter[int]()
        self._num_metrics = Counter[int]()
        self._dumps: list[tuple[StackDump, Callable[[Positions], None]]] = []
        self._hung: tuple[Positions, list[str]] | None = None
        self.begin_anew()

    @property
    def is_asking(self) -> bool:
        """Whether ranks have been asked for their stacks."""
        return bool(self._dumps)

    def begin_anew(self) -> None:
        """Take it that all ranks make progress now."""
        timeout_s = self._attempt.spec.hang_timeout_s
        self._watchdog = Watchdog(math.inf if timeout_s is None else timeout_s)

    def count(self, rank: int, event: Event) -> None:
        """Count an event of a rank; values that it logs are progress, what it prints is none."""
        counts = self._num_metrics if isinstance(event, Metric) else self._num_messages
        counts[rank] += 1

    def inspect(self, readings: Sequence[SlotReading], pids: Mapping[int, int]) -> None:
        """Look at the progress of all ranks. Called a few times a second.

        Args:
            readings: of the board.
            pids: rank -> process, of the ranks of this machine whose function runs.
        """
        now = time.monotonic()
        progress = {
            reading.rank: progress_of(
                now, reading, self._num_metrics[reading.rank], self._num_messages[reading.rank]
            )
            for reading in readings
        }
        if self._watchdog.observe(now, progress, list(pids)):
            self._dump_stacks(self._judge)

    def ask(self, query: Query) -> None:
        """Answer a query where all ranks are, when their stacks are there."""
        self._dump_stacks(partial(self._answer, query))

    def poll(self) -> tuple[Positions, list[str]] | None:
        """Handle stacks that are complete; return positions and description of a certain hang that they show."""
        self._hung = None
        for dump, handle in list(self._dumps):
            dump.poll()
            if dump.is_done:
                self._dumps.remove((dump, handle))
                handle(dump.positions())
        return self._hung

    def _dump_stacks(self, handle: Callable[[Positions], None]) -> None:
        log, number = self._attempt.log, self._attempt.number
        paths = {rank: log.stacks_path(rank, number) for rank in self._attempt.ranks}
        self._dumps.append((StackDump(self._active_pids(), paths), handle))

    def _answer(self, query: Query, positions: Positions) -> None:
        is_hang = positions.keys() <= self._watchdog.still_for(time.monotonic()).keys()
        lines = self._describe(positions) if is_hang else describe_positions(positions)
        self._requests.answer(query, "\n".join(lines))

    def _judge(self, positions: Positions) -> None:
        """Report what the watchdog finds in the stacks that it wanted."""
        now = time.monotonic()
        finding = self._watchdog.judge(now, _checks(self._active_pids(), positions))
        for rank, for_s in self._watchdog.still_for(now).items():
            at = positions.get(rank)
            is_named = finding is not None and rank in (*finding.hung, *finding.suspected)
            if at is not None and (at.waits_for_ranks or is_named):
                is_certain = at.waits_for_ranks or (finding is not None and rank in finding.hung)
                waiting_in = at.waiting_in if at.waits_for_ranks else ""
                self._emit(Stalled(rank, time.time(), at.place, waiting_in, for_s, is_certain))
        if finding is not None:
            lines = self._describe(positions, finding.busy)
            text = "\n".join([self._headline(finding), *(f"    {line}" for line in lines)])
            self._emit(Note.of_job(text, "hang"))
            if finding.hung:
                self._hung = positions, lines

    def _describe(self, positions: Positions, busy: Sequence[int] = ()) -> list[str]:
        steps = {reading.rank: reading.step for reading in self._board.read()}
        lines = describe_hang(positions, steps, gone=sorted(self._done()), busy=busy)
        if self._attempt.plan.start_method == "fork":
            lines += fork_safety.explain_hang(list(positions.values()))
        return lines

    def _headline(self, finding: Finding) -> str:
        timeout_s = self._watchdog.timeout_s
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
