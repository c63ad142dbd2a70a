"""Detection and description of hangs: which ranks are waiting for which.

    HangDetector   progress (steps, collectives, bars, logged values) -> observe() -> stacks needed?
                   stacks, processor time, output                     -> judge()   -> hang, suspicion or nothing
    describe_hang  positions of all ranks as text, and what they mean together

Nothing here sends signals or blocks. Processor time and output do not count as progress, because a thread of a hung
rank may still compute or print. They only affect how certain the report is. A rank that makes no progress is checked
three times, to distinguish a stack that never changes from one that does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nblaunch import formatting
from nblaunch.diagnosis.root_cause import SAME_COLLECTIVES
from nblaunch.diagnosis.stacks import Position
from nblaunch.events import WorkerState
from nblaunch.wire.board import SlotReading

_WORKING = (WorkerState.STARTING, WorkerState.COMPILING)
"""States that count as progress for as long as they last."""

_CHECKS_AT = (0.5, 0.75, 1.0)
"""When to check a rank that makes no progress, as fractions of the timeout."""

_IDLE_SHARE = 0.02
"""Fraction of one core below which a thread counts as idle; polling threads use less."""

_IDLE_S = 0.05
"""CPU seconds below which a thread counts as idle if the timeout is short: the system counts in units of 0.01 s."""


@dataclass(frozen=True)
class Progress:
    """Progress of a rank so far.

    Args:
        signs: a tuple that changes with every sign of progress: see :func:`progress_of`.
        has_stepped: the rank has taken steps.
        num_messages: number of output lines and of events other than metrics; these do not count as progress.
    """

    signs: tuple[object, ...]
    has_stepped: bool = False
    num_messages: int = 0


@dataclass(frozen=True)
class Check:
    """State of a rank at a point in time.

    Args:
        position: where the rank is in its code.
        own_cpu_s: CPU seconds of the thread that runs the function; None if unknown.
        all_cpu_s: CPU seconds of all threads and child processes of the rank.
    """

    position: Position
    own_cpu_s: float | None = None
    all_cpu_s: float | None = None


@dataclass(frozen=True)
class Finding:
    """Ranks that make no progress.

    Args:
        hung: ranks that hang.
        suspected: ranks that take no steps, but are computing or printing.
        busy: ranks whose function is using the processor and is not waiting for other ranks.
    """

    hung: tuple[int, ...] = ()
    suspected: tuple[int, ...] = ()
    busy: tuple[int, ...] = ()


@dataclass
class _Rank:
    progress: Progress
    moved_s: float
    # Start of the current series of checks: when the rank last made progress, or the time of the last verdict.
    checks_from_s: float
    num_messages: int  # at checks_from_s
    num_started: int = 0
    checks: list[tuple[float, Check]] = field(default_factory=list)
    was_reported: bool = False
    was_suspected: bool = False

    def restart_checks(self, now_s: float, num_messages: int) -> None:
        self.checks_from_s = now_s
        self.num_messages = num_messages
        self.num_started = 0
        del self.checks[:-1]

    @property
    def position(self) -> Position:
        return self.checks[-1][1].position

    @property
    def has_moved(self) -> bool:
        """Whether its stack has changed between checks."""
        return len({check.position.stack for _, check in self.checks}) > 1

    @property
    def is_importing(self) -> bool:
        """Whether it is importing a library and making progress.

        Imports are slow if many ranks start on a busy machine.
        """
        return self.position.is_importing and (self.has_moved or not self.is_idle(alone=True))

    def is_idle(self, *, alone: bool) -> bool:
        """Return whether all its threads and processes are idle; with ``alone``, check only the function's thread."""
        (first_s, first), (last_s, last) = self.checks[0], self.checks[-1]
        before, after = (first.own_cpu_s, last.own_cpu_s) if alone else (first.all_cpu_s, last.all_cpu_s)
        if before is None or after is None:
            return True
        return after - before < max(_IDLE_SHARE * (last_s - first_s), _IDLE_S)


class HangDetector:
    """Detects ranks that make no progress for ``timeout_s`` seconds, and reports each hang of a rank once."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._ranks: dict[int, _Rank] = {}
        self._running: Sequence[int] = ()
        self._num_messages: dict[int, int] = {}
        self._is_checking = False

    def observe(self, now_s: float, progress: Mapping[int, Progress], running: Sequence[int]) -> bool:
        """Record the progress of every rank; return whether the stacks of the running ranks are needed.

        If they are, :meth:`judge` must be called next.

        Args:
            now_s: ``time.monotonic()``.
            progress: progress of all ranks of the job, including those on other machines.
            running: ranks on this machine whose function is running, or that are still sending their weights and
                optimizer states.
        """
        for rank, shown in progress.items():
            state = self._ranks.get(rank)
            if state is None or state.progress.signs != shown.signs:
                self._ranks[rank] = _Rank(shown, now_s, now_s, shown.num_messages)
        self._num_messages = {rank: shown.num_messages for rank, shown in progress.items()}
        self._running = running
        if self._is_checking:
            return False
        due = [rank for rank in running if self._is_due(self._ranks[rank], now_s)]
        for rank in due:
            self._ranks[rank].num_started += 1
        self._is_checking = bool(due)
        return self._is_checking

    def still_for(self, now_s: float) -> dict[int, float]:
        """Return how long, in seconds, each running rank that is due for a check has gone without progress."""
        still = {rank: now_s - self._ranks[rank].moved_s for rank in self._running if rank in self._ranks}
        return {rank: for_s for rank, for_s in still.items() if for_s >= _CHECKS_AT[0] * self.timeout_s}

    def mark_reported(self, ranks: Iterable[int]) -> bool:
        """Mark the hang of ``ranks`` as reported; return False if it already was."""
        states = [self._ranks[rank] for rank in ranks if rank in self._ranks]
        is_new = not all(state.was_reported for state in states)
        for state in states:
            state.was_reported = True
        return is_new

    def judge(self, now_s: float, checks: Mapping[int, Check]) -> Finding | None:
        """Record a check of the running ranks; return a finding if there is a new one."""
        self._is_checking = False
        ranks = {rank: self._ranks[rank] for rank in checks if rank in self._ranks}
        for rank, state in ranks.items():
            state.checks.append((now_s, checks[rank]))
        if not any(state.num_started == len(_CHECKS_AT) for state in ranks.values()):
            return None
        if any(state.checks and state.is_importing for state in ranks.values()):
            for rank, state in ranks.items():  # including ranks that may be waiting for the importing rank
                state.restart_checks(now_s, self._num_messages.get(rank, 0))
            return None
        moved_s = max(state.moved_s for state in self._ranks.values())  # of any rank of the job
        hung: list[int] = []
        suspected: list[int] = []
        for rank, state in ranks.items():
            if now_s - state.moved_s < self.timeout_s or len(state.checks) < 2:
                continue
            is_alone = moved_s - state.moved_s >= self.timeout_s
            if now_s - moved_s < self.timeout_s and (not is_alone or state.position.waits_for_ranks):
                # Other ranks are making progress, or were until a moment ago.
                state.restart_checks(moved_s, self._num_messages.get(rank, 0))
                continue
            is_hung = now_s - moved_s >= self.timeout_s and self._is_hung(rank, state)
            (hung if is_hung else suspected).append(rank)
        # A rank that waits for others may poll; that does not count as computing.
        busy = tuple(
            rank
            for rank, state in ranks.items()
            if state.checks and not state.position.waits_for_ranks and not state.is_idle(alone=True)
        )
        return self._finding(now_s, hung, suspected, busy)

    def _finding(
        self, now_s: float, hung: Sequence[int], suspected: Sequence[int], busy: tuple[int, ...]
    ) -> Finding | None:
        """Return the finding unless all of it has been reported."""
        if any(state.checks and state.position.is_long_work for state in self._running_ranks()):
            # The others are waiting for the rank that is compiling or saving.
            hung, suspected = [], [*hung, *suspected]
        is_new = any(not self._ranks[rank].was_reported for rank in hung) or any(
            not (self._ranks[rank].was_suspected or self._ranks[rank].was_reported) for rank in suspected
        )
        for rank in (*hung, *suspected):
            state = self._ranks[rank]
            state.was_reported |= rank in hung
            state.was_suspected = True
            state.restart_checks(now_s, self._num_messages.get(rank, 0))
        return Finding(tuple(sorted(hung)), tuple(sorted(suspected)), busy) if is_new else None

    def _running_ranks(self) -> list[_Rank]:
        return [self._ranks[rank] for rank in self._running if rank in self._ranks]

    def _is_hung(self, rank: int, state: _Rank) -> bool:
        """Return whether a rank that makes no progress is certainly hung, and not just busy between steps."""
        if state.has_moved or state.position.is_long_work:
            return False
        if state.progress.has_stepped:
            return True
        if state.position.waits_for_ranks:
            return state.is_idle(alone=True)
        has_sent = self._num_messages.get(rank, 0) != state.num_messages
        return state.is_idle(alone=False) and not has_sent

    def _is_due(self, state: _Rank, now_s: float) -> bool:
        if state.num_started == len(_CHECKS_AT):
            return False
        return now_s - state.checks_from_s >= _CHECKS_AT[state.num_started] * self.timeout_s


def progress_of(now_s: float, reading: SlotReading, num_metrics: int, num_messages: int) -> Progress:
    """Return the progress of a rank, from its slot on the board and the counts of its logged values and messages."""
    working_s = now_s if reading.state in _WORKING else 0.0
    steps = (reading.step, reading.samples, reading.epoch, reading.num_updates)
    others = (
        reading.state,
        reading.num_progress_signs,
        reading.num_checks,
        reading.busy_steps,
        reading.built_bytes,
        num_metrics,
        working_s,
    )
    return Progress((*steps, *others), has_stepped=any(steps), num_messages=num_messages)


def describe_positions(positions: Mapping[int, Position], busy: Sequence[int] = ()) -> list[str]:
    """Return lines with the positions of all ranks; ranks at the same position share a line.

    Args:
        positions: rank -> position, for running ranks.
        busy: ranks that use the processor.
    """
    texts = {
        rank: f"{position} (computing)" if rank in busy else str(position)
        for rank, position in positions.items()
    }
    return [f"{formatting.ranks(ranks)}: {text}" for text, ranks in formatting.ranks_by_text(texts).items()]


def advice(positions: Mapping[int, Position]) -> str:
    """Return advice for ranks at ``positions`` that have made no progress for ``hang_timeout_s``."""
    if any(position.waits_for_ranks for position in positions.values()):
        return f"{SAME_COLLECTIVES} If the rank did not hang but was busy for that long, increase hang_timeout_s."
    return (
        "If the function did not hang but was busy for that long, increase hang_timeout_s, or show progress with tqdm "
        "or accelerator.progress."
    )


def describe_hang(
    positions: Mapping[int, Position],
    steps: Mapping[int, int],
    gone: Mapping[int, str],
    busy: Sequence[int] = (),
    *,
    is_explained: bool = False,
) -> list[str]:
    """Return the positions of all ranks, and a line that interprets them.

    Args:
        positions: rank -> position, for ranks that make no progress.
        steps: rank -> number of batches so far.
        gone: rank whose function has ended -> how it ended, such as ``returned from the function``.
        busy: ranks that use the processor.
        is_explained: the recorded collectives already explain the hang.
    """
    lines = describe_positions(positions, busy)
    interpretation = "" if is_explained else _interpret(positions, steps, gone)
    return [*lines, interpretation] if interpretation else lines


def cause(positions: Mapping[int, Position], candidates: Sequence[int]) -> tuple[tuple[int, ...], str]:
    """Return the ranks that the others are waiting for (empty if all are waiting), and a sentence about what happened.

    Args:
        positions: rank -> position, for running ranks.
        candidates: ranks whose function is running (at least one).
    """
    waiting = [rank for rank in candidates if rank in positions and positions[rank].waits_for_ranks]
    absent = [rank for rank in candidates if rank not in waiting]
    if waiting and absent:
        are = "are" if len(waiting) > 1 else "is"
        collective = f"did not enter the collective that {formatting.ranks(waiting)} {are} waiting in"
        return tuple(absent), f"{formatting.ranks(absent)} {collective}"
    return (), f"{formatting.ranks(candidates)} made no progress"


def _interpret(positions: Mapping[int, Position], steps: Mapping[int, int], gone: Mapping[int, str]) -> str:
    waiting = {rank: position for rank, position in positions.items() if position.waits_for_ranks}
    absent = [rank for rank in positions if rank not in waiting]
    if not waiting:
        return ""
    if gone:
        advice = "Check that all ranks see the same number of batches."
        if all(position.waiting_in == "init_process_group" for position in waiting.values()):
            advice = "Every rank must call init_process_group, as Accelerator() does."
        return f"{formatting.states(gone)}, so the others will wait forever. {advice}"
    if absent:
        wait, has = "wait" if len(waiting) > 1 else "waits", "have" if len(absent) > 1 else "has"
        return (
            f"{formatting.ranks(waiting)} {wait} for {formatting.ranks(absent)}, which {has} not entered the "
            "collective."
        )
    taken = {rank: steps[rank] for rank in waiting if rank in steps}
    if len(set(taken.values())) > 1:
        counts = ", ".join(f"rank {rank}: {count}" for rank, count in sorted(taken.items()))
        return f"The ranks have processed different numbers of batches ({counts})."
    if len({(position.waiting_in, position.where) for position in waiting.values()}) > 1:
        return "The ranks are in different collectives: every rank must call the same ones in the same order."
    return ""
