"""Whether a job hangs, and which ranks wait for which.

    Inspector    reads processes and the board a few times a second, feeds the Watchdog
    Watchdog     counted progress (steps, collectives, bars, logged values) -> observe() -> time for a check?
                 checks: stack, processor time, output                      -> judge()   -> hang, suspicion or nothing
    describe_hang   the positions of all ranks as text, and what they mean together

Nothing here sends signals or blocks. Processor time and output are no progress: a rank that waits for ever may well
have a thread that computes or prints. They only decide how certain the report is. A rank without progress is checked
three times before it is judged, so that a stack that never changes can be distinguished from one that moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nblaunch import formatting
from nblaunch.diagnosis import stacks
from nblaunch.diagnosis.memory import MemoryRecord
from nblaunch.diagnosis.stacks import Position
from nblaunch.events import WorkerState
from nblaunch.host import proc
from nblaunch.wire.board import Sample

_INTERVAL_S = 0.25

_WORKING = (WorkerState.STARTING, WorkerState.COMPILING)
"""States in which a rank is known to be at work, for as long as they last."""

_LOOKS_AT = (0.5, 0.75, 1.0)
"""When a rank is looked at, as parts of the timeout."""

_IDLE_SHARE = 0.02
"""Share of one core below which a thread counts as idle: one that only wakes to look around uses less."""

_IDLE_S = 0.05
"""And the same in seconds, for short timeouts: the system counts in hundredths, and a look costs some of them."""


@dataclass(frozen=True)
class Progress:
    """What a rank has shown by now.

    Args:
        signs: changes with every step, collective and mark.
        has_stepped: whether steps were among them.
        num_outputs: lines and displays, which are no progress.
    """

    signs: tuple[object, ...]
    has_stepped: bool = False
    num_outputs: int = 0


@dataclass(frozen=True)
class Look:
    """What was seen of a rank at one moment.

    Args:
        position: where it is.
        own_cpu_s: processor time of the thread that runs the function, in seconds; None where it can't be read.
        all_cpu_s: of all threads and child processes of the rank.
    """

    position: Position
    own_cpu_s: float | None = None
    all_cpu_s: float | None = None


@dataclass(frozen=True)
class Finding:
    """What was found about ranks without progress.

    Args:
        hung: they will not go on by themselves.
        suspected: they take no steps, but compute or print.
        busy: ranks whose function uses its processor.
    """

    hung: tuple[int, ...] = ()
    suspected: tuple[int, ...] = ()
    busy: tuple[int, ...] = ()


@dataclass
class _Rank:
    progress: Progress
    moved_s: float
    # When the present period of looks began: with the last progress, or with the last judgement.
    period_s: float
    num_asked: int = 0
    looks: list[tuple[float, Look]] = field(default_factory=list)
    was_reported: bool = False
    was_suspected: bool = False

    def begin_period(self, now_s: float) -> None:
        self.period_s = now_s
        self.num_asked = 0
        del self.looks[:-1]

    @property
    def position(self) -> Position:
        return self.looks[-1][1].position

    @property
    def has_moved(self) -> bool:
        """Whether its stack was seen to change."""
        return len({look.position.stack for _, look in self.looks}) > 1

    def is_idle(self, *, alone: bool) -> bool:
        """Whether its thread (``alone``), or all that belongs to it, uses no processor time worth mentioning."""
        (first_s, first), (last_s, last) = self.looks[0], self.looks[-1]
        before, after = (first.own_cpu_s, last.own_cpu_s) if alone else (first.all_cpu_s, last.all_cpu_s)
        if before is None or after is None:
            return True
        return after - before < max(_IDLE_SHARE * (last_s - first_s), _IDLE_S)


class Watchdog:
    """Notices ranks that have made no progress for ``timeout_s`` seconds; once for each standstill of each rank."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._ranks: dict[int, _Rank] = {}
        self._running: Sequence[int] = ()
        self._num_outputs: dict[int, int] = {}
        self._is_looking = False

    def observe(self, now_s: float, progress: Mapping[int, Progress], running: Sequence[int]) -> bool:
        """Take in what every rank has shown; True if it is time to look at the running ones.

        After that :meth:`judge` must be called.

        Args:
            now_s: ``time.monotonic()``.
            progress: of all ranks of the job, also on other machines.
            running: those whose function runs here.
        """
        for rank, shown in progress.items():
            known = self._ranks.get(rank)
            if known is None or known.progress.signs != shown.signs:
                self._ranks[rank] = _Rank(shown, now_s, now_s)
        self._num_outputs = {rank: shown.num_outputs for rank, shown in progress.items()}
        self._running = running
        if self._is_looking:
            return False
        due = [rank for rank in running if self._is_due(self._ranks[rank], now_s)]
        for rank in due:
            self._ranks[rank].num_asked += 1
        self._is_looking = bool(due)
        return self._is_looking

    def judge(self, now_s: float, looks: Mapping[int, Look]) -> Finding | None:
        """Take in a look at the running ranks; the finding, if there is one that was not reported yet."""
        self._is_looking = False
        ranks = {rank: self._ranks[rank] for rank in looks if rank in self._ranks}
        for rank, known in ranks.items():
            known.looks.append((now_s, looks[rank]))
        if not any(known.num_asked == len(_LOOKS_AT) for known in ranks.values()):
            return None
        moved_s = max(known.moved_s for known in self._ranks.values())  # of any rank of the job
        hung: list[int] = []
        suspected: list[int] = []
        for rank, known in ranks.items():
            if now_s - known.moved_s < self.timeout_s or len(known.looks) < 2:
                continue
            is_alone = moved_s - known.moved_s >= self.timeout_s
            if now_s - moved_s < self.timeout_s and (not is_alone or known.position.waits_for_ranks):
                known.begin_period(moved_s)  # the job goes on, or did until a moment ago: its clock counts
                continue
            is_hung = now_s - moved_s >= self.timeout_s and self._stands_still(rank, known)
            (hung if is_hung else suspected).append(rank)
        busy = tuple(rank for rank, known in ranks.items() if known.looks and not known.is_idle(alone=True))
        return self._finding(now_s, hung, suspected, busy)

    def _finding(
        self, now_s: float, hung: Sequence[int], suspected: Sequence[int], busy: tuple[int, ...]
    ) -> Finding | None:
        """What of it is new."""
        if any(known.looks and known.position.is_long_work for known in self._running_ranks()):
            hung, suspected = [], [*hung, *suspected]  # the others wait for that one
        is_new = any(not self._ranks[rank].was_reported for rank in hung) or any(
            not (self._ranks[rank].was_suspected or self._ranks[rank].was_reported) for rank in suspected
        )
        for rank in (*hung, *suspected):
            known = self._ranks[rank]
            known.was_reported |= rank in hung
            known.was_suspected = True
            known.begin_period(now_s)
        return Finding(tuple(sorted(hung)), tuple(sorted(suspected)), busy) if is_new else None

    def _running_ranks(self) -> list[_Rank]:
        return [self._ranks[rank] for rank in self._running if rank in self._ranks]

    def _stands_still(self, rank: int, known: _Rank) -> bool:
        """Whether a rank without progress hangs for certain, rather than doing what takes no steps."""
        if known.has_moved or known.position.is_long_work:
            return False
        if known.progress.has_stepped:
            return True
        if known.position.waits_for_ranks:
            return known.is_idle(alone=True)
        has_output = self._num_outputs.get(rank, 0) != known.progress.num_outputs
        return known.is_idle(alone=False) and not has_output

    def _is_due(self, known: _Rank, now_s: float) -> bool:
        if known.num_asked == len(_LOOKS_AT):
            return False
        return now_s - known.period_s >= _LOOKS_AT[known.num_asked] * self.timeout_s


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


def describe_hang(
    positions: Mapping[int, Position],
    steps: Mapping[int, int],
    gone: Sequence[int],
    busy: Sequence[int] = (),
) -> list[str]:
    """Who is where, equal positions together, and what that looks like.

    Args:
        positions: of the ranks that run.
        steps: rank -> batches that it has taken.
        gone: ranks that have returned already.
        busy: ranks that are known to compute there.
    """
    texts = {
        rank: f"{position} (computing)" if rank in busy else str(position)
        for rank, position in positions.items()
    }
    merged = stacks.merge(texts)
    lines = [f"{formatting.ranks(ranks)}: {text}" for text, ranks in merged.items()]
    reading = _reading(positions, steps, gone)
    return [*lines, reading] if reading else lines


def _reading(positions: Mapping[int, Position], steps: Mapping[int, int], gone: Sequence[int]) -> str:
    waiting = {rank: position for rank, position in positions.items() if position.waits_for_ranks}
    absent = [rank for rank in positions if rank not in waiting]
    if not waiting:
        return ""
    if gone:
        return (
            f"{formatting.ranks(gone)} returned already, so the others wait for ever: do all ranks see equally many "
            "batches?"
        )
    if absent:
        wait, has = "wait" if len(waiting) > 1 else "waits", "have" if len(absent) > 1 else "has"
        return (
            f"{formatting.ranks(waiting)} {wait} for {formatting.ranks(absent)}, which {has} not entered the "
            "collective."
        )
    taken = {rank: steps[rank] for rank in waiting if rank in steps}
    if len(set(taken.values())) > 1:
        counts = ", ".join(f"rank {rank}: {count}" for rank, count in sorted(taken.items()))
        return f"The ranks have taken unequal numbers of batches ({counts})."
    if len({(position.waiting_in, position.where) for position in waiting.values()}) > 1:
        return "The ranks are in different collectives: every rank must call the same ones in the same order."
    return ""
