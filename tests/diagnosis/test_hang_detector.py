"""Findings about ranks without progress, over simulated time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.diagnosis.hang import Check, Finding, HangDetector, Progress
from nblaunch.diagnosis.stacks import Position, StackFrame

T = 10.0


@dataclass(frozen=True)
class Is:
    """A rank's activity at one moment.

    Args:
        signs: counted progress so far.
        has_stepped: whether the progress includes steps.
        line: current line.
        waiting_in: as in a position.
        is_long_work: likewise.
        is_importing: likewise.
        cpu: processor seconds of its thread so far; None = unknown.
        others_cpu: processor seconds of other threads and children.
        outputs: number of lines so far.
    """

    signs: int = 0
    has_stepped: bool = False
    line: int = 1
    waiting_in: str = ""
    is_long_work: bool = False
    is_importing: bool = False
    cpu: float | None = 0.0
    others_cpu: float = 0.0
    outputs: int = 0

    @property
    def look(self) -> Check:
        stack = (StackFrame("train.py", self.line, "train"),)
        position = Position(f"line {self.line}", self.waiting_in, self.is_long_work, stack, self.is_importing)
        return Check(position, self.cpu, None if self.cpu is None else self.cpu + self.others_cpu)


Rank = Callable[[float], Is]


def findings(
    ranks: Mapping[int, Rank], until_s: float = 4 * T, tick_s: float = 0.25
) -> list[tuple[float, Finding]]:
    """Return all findings while time advances."""
    detector, found, now_s = HangDetector(T), [], 0.0
    while now_s <= until_s:
        states = {rank: rank_is(now_s) for rank, rank_is in ranks.items()}
        progress = {
            rank: Progress((state.signs,), state.has_stepped, state.outputs) for rank, state in states.items()
        }
        if detector.observe(now_s, progress, list(ranks)):
            finding = detector.judge(now_s, {rank: state.look for rank, state in states.items()})
            if finding is not None:
                found.append((now_s, finding))
        now_s += tick_s
    return found


def spins(t: float) -> Is:
    return Is(cpu=t)


def moves(t: float) -> Is:
    return Is(cpu=t, line=int(t * 4))


def sleeps(t: float) -> Is:
    return Is()


def waits(t: float) -> Is:
    return Is(waiting_in="all_reduce")


def steps(t: float) -> Is:
    return Is(signs=int(t / 4), has_stepped=True, cpu=t, line=int(t * 4))


def then(first: Rank, at_s: float, second: Rank) -> Rank:
    """Return a behaviour that continues ``first`` with ``second`` at ``at_s``, keeping its counts."""

    def rank(t: float) -> Is:
        if t < at_s:
            return first(t)
        before, now = first(at_s), second(t)
        return replace(
            now,
            signs=before.signs + now.signs,
            has_stepped=before.has_stepped,
            outputs=before.outputs + now.outputs,
        )

    return rank


def with_thread(share: float, rank: Rank) -> Rank:
    """Let another thread of the rank compute, such as a monitor, or a thread that calls ``sleep(0)`` in a loop."""
    return lambda t: replace(rank(t), others_cpu=share * t)


def printing(rank: Rank) -> Rank:
    return lambda t: replace(rank(t), outputs=int(t / 3))


@pytest.mark.parametrize(
    ("ranks", "hung", "suspected"),
    [
        ({0: sleeps}, (0,), ()),
        ({0: waits, 1: waits}, (0, 1), ()),
        ({0: waits, 1: spins}, (0,), (1,)),
        ({0: waits, 1: moves}, (0,), (1,)),
        ({0: with_thread(1.0, waits), 1: with_thread(1.0, waits)}, (0, 1), ()),
        ({0: with_thread(0.04, waits), 1: with_thread(0.04, waits)}, (0, 1), ()),
        ({0: printing(waits), 1: printing(waits)}, (0, 1), ()),
        ({0: with_thread(0.04, sleeps)}, (), (0,)),
        ({0: printing(sleeps)}, (), (0,)),
        ({0: spins, 1: spins}, (), (0, 1)),
        ({0: moves}, (), (0,)),
        ({0: then(steps, 12.0, spins), 1: then(steps, 12.0, spins)}, (0, 1), ()),
        ({0: then(steps, 12.0, moves)}, (), (0,)),
        ({0: lambda t: Is(cpu=t, is_long_work=True), 1: waits}, (), (0, 1)),
        ({0: lambda t: Is(cpu=None)}, (0,), ()),
        ({0: lambda t: Is(is_importing=True), 1: waits}, (0, 1), ()),
    ],
    ids=[
        "silent",
        "all wait",
        "one computes in C and one waits",
        "one computes in Python and one waits",
        "threads that call sleep(0)",
        "monitor threads",
        "threads that print",
        "not in a collective, with a monitor",
        "prints and sleeps",
        "all in a C loop",
        "all compute",
        "steps, then a C loop",
        "steps, then Python that moves",
        "one saves and one waits",
        "processor time unknown",
        "a stalled import",
    ],
)
def test_each_stall_is_found_once(
    ranks: dict[int, Rank], hung: tuple[int, ...], suspected: tuple[int, ...]
) -> None:
    ((_, finding),) = findings(ranks)
    assert (finding.hung, finding.suspected) == (hung, suspected)


@pytest.mark.parametrize(
    "ranks",
    [
        {0: steps, 1: steps},
        {0: steps, 1: waits},
        {0: then(waits, 30.0, steps), 1: then(steps, 30.0, waits)},
        {0: lambda t: Is(signs=int(t / 9.5), line=1)},
        {0: lambda t: Is(is_importing=True, cpu=t), 1: waits},
        {0: lambda t: Is(is_importing=True, line=int(t)), 1: sleeps},
    ],
    ids=[
        "steps",
        "one evaluates and one waits",
        "they take turns",
        "slow steps",
        "one imports and one waits",
        "one imports from a slow disk",
    ],
)
def test_a_running_job_is_not_reported(ranks: dict[int, Rank]) -> None:
    assert findings(ranks, until_s=39.0) == []


def test_the_timeout_starts_at_the_last_progress() -> None:
    ((at_s, finding),) = findings({0: waits, 1: then(steps, 20.0, waits)})
    assert finding.hung == (0, 1)
    assert 30.0 <= at_s < 31.0


def test_ranks_that_stop_shortly_after_each_other_are_one_hang() -> None:
    ranks = {0: then(steps, 12.0, spins), 1: then(steps, 16.0, waits), 2: then(steps, 16.0, waits)}
    ((at_s, finding),) = findings(ranks)
    assert finding.hung == (0, 1, 2)
    assert finding.busy == (0,)
    assert at_s >= 26.0


def test_polling_for_others_is_not_computing() -> None:
    def polls(t: float) -> Is:
        return replace(waits(t), cpu=0.5 * t)

    ((_, finding),) = findings({0: then(steps, 12.0, spins), 1: then(steps, 16.0, polls)})
    assert finding.hung == (0, 1)
    assert finding.busy == (0,)


def test_a_single_stalled_rank_is_suspected() -> None:
    ((_, finding),) = findings({0: sleeps, 1: steps})
    assert (finding.hung, finding.suspected) == ((), (0,))


def test_a_long_computation_does_not_hide_the_hang_after_it() -> None:
    first, second = findings({0: then(moves, 3600.0, lambda t: Is(cpu=3600.0))}, until_s=3700.0, tick_s=1.0)
    assert (first[1].suspected, second[1].hung) == ((0,), (0,))
    assert second[0] < 3600.0 + 2.5 * T


def test_old_output_does_not_hide_a_hang() -> None:
    prints_once = then(sleeps, 1.0, lambda t: Is(outputs=4000))
    first, second = findings({0: prints_once})
    assert (first[1].suspected, second[1].hung) == ((0,), (0,))
    assert second[0] < 2.5 * T


def test_progress_allows_another_report() -> None:
    hangs = then(then(sleeps, 15.0, lambda t: Is(signs=1)), 30.0, lambda t: Is(signs=2))
    assert [finding.hung for _, finding in findings({0: hangs}, until_s=50.0)] == [(0,)] * 3


def test_ended_ranks_are_ignored() -> None:
    detector = HangDetector(T)
    progress = {0: Progress(("x",)), 1: Progress(("x",))}
    assert not detector.observe(0.0, progress, [0, 1])
    assert not detector.observe(50.0, progress, [])


@given(st.lists(st.floats(0.01, 9.9), min_size=1, max_size=50), st.booleans())
def test_a_rank_that_moves_often_enough_never_hangs(gaps_s: list[float], is_idle: bool) -> None:
    detector, now = HangDetector(T), 0.0
    for step, gap_s in enumerate(gaps_s):
        for moment in (now, now + gap_s):
            if detector.observe(moment, {0: Progress((step,), has_stepped=True)}, [0]):
                assert detector.judge(moment, {0: Is(cpu=0.0 if is_idle else moment).look}) is None
        now += gap_s
