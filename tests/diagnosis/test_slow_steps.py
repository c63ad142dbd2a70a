"""Causes of slow steps: each cause from its facts, none for loops at full speed, and real jobs."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from nblaunch.diagnosis.slow_steps import (
    Cause,
    Machine,
    Neighbour,
    Processors,
    StepTimes,
    find_cause,
    step_times,
)
from nblaunch.events import Event, Note
from nblaunch.launcher.plan import plan_launch
from nblaunch.launcher.runner import JobRunner
from nblaunch.spec import LaunchSpec
from nblaunch.wire.board import SlotReading
from nblaunch.wire.collective_calls import COLLECTIVES
from nblaunch.wire.spans import Span, SpanKind
from tests.diagnosis import slow_programs
from tests.thorough import thorough

NUM_STEPS, PERIOD_S = 100, 10.0  # 100 ms per step
QUIET = Processors(wait_share=0.02, num_threads=1, run_s=8.0, wait_s=0.2)
BUSY = Processors(wait_share=0.6, num_threads=1, run_s=3.0, wait_s=6.0)
HOG = Neighbour(812, "python", 0.5, is_pinned=True)
MACHINE = Machine(2)


def times(
    shares: Mapping[SpanKind, float], counts: Mapping[SpanKind, int] | None = None, **others: Any
) -> StepTimes:
    """Return a rank's times in 100 steps, from shares by kind."""
    seconds = {kind: share * PERIOD_S for kind, share in shares.items()}
    numbers = {**dict.fromkeys(shares, NUM_STEPS), **(counts or {})}
    return StepTimes(NUM_STEPS, PERIOD_S, seconds, numbers, **others)


CLEAN = times({SpanKind.DATA: 0.05, SpanKind.BACKWARD: 0.5, SpanKind.OPTIMIZER: 0.1}, elements=1000.0)
WAITING = times({SpanKind.DATA: 0.05, SpanKind.BACKWARD: 0.8, SpanKind.OPTIMIZER: 0.1}, elements=1000.0)


def judged(*ranks: StepTimes, uses: Sequence[Processors] = (), machine: Machine = MACHINE) -> Cause | None:
    chosen = uses or [QUIET] * len(ranks)
    return find_cause(dict(enumerate(ranks)), dict(enumerate(chosen)), machine)


def all_alike(shares: Mapping[SpanKind, float], **others: Any) -> Cause | None:
    return judged(times(shares, **others), times(shares, **others))


CAUSES: dict[str, tuple[Callable[[], Cause | None], str, tuple[int, ...], str]] = {
    "data on all ranks": (
        lambda: all_alike({SpanKind.DATA: 0.62, SpanKind.BACKWARD: 0.3}),
        "data", (), "62 % of each step is spent waiting for data on all ranks (num_workers=0",
    ),
    "too few workers": (
        lambda: all_alike({SpanKind.DATA: 0.62}, num_workers=2), "data", (), "num_workers=2 is too low",
    ),
    "data on one rank": (
        lambda: judged(WAITING, times({SpanKind.DATA: 0.5, SpanKind.BACKWARD: 0.3})),
        "data", (1,), "rank 1 spends 50 % of each step waiting for data, the others 5 %",
    ),
    "long batches": (
        lambda: judged(WAITING, WAITING, times({SpanKind.BACKWARD: 0.4}, elements=3000.0)),
        "batches", (2,), "batches on rank 2 are 3.0 times longer (3,000 vs. 1,000 elements)",
    ),
    "saves": (
        lambda: judged(times({SpanKind.SAVE: 0.4}, saved_bytes=NUM_STEPS * 1.2e9), WAITING),
        "saves", (0,), "each step saves 1.20 GB, which takes 40 % of the time on rank 0",
    ),
    "garbage": (
        lambda: all_alike({SpanKind.GARBAGE: 0.3}), "garbage", (), "garbage collection takes 30 % of each step",
    ),
    "evaluations": (
        lambda: all_alike({}, counts={SpanKind.EVALUATION: 20}, evaluated_s=7.0, batches=400.0),
        "evaluations", (), "evaluation takes 70 % of the time: 20 batches after every 5 steps",
    ),
    "collectives": (
        lambda: all_alike({SpanKind.COLLECTIVE: 0.5}, counts={SpanKind.COLLECTIVE: 2000}, collective="all_reduce"),
        "collectives", (), "50 % of each step is spent in 20 collectives, most of them all_reduce",
    ),
    "optimizer": (
        lambda: all_alike({SpanKind.OPTIMIZER: 0.7}), "optimizer", (), "the optimizer takes 70 % of each step",
    ),
    "shared core": (
        lambda: judged(
            WAITING, CLEAN, uses=[QUIET, Processors(0.5, 1, 5.0, 5.0, HOG)]
        ),
        "shared core", (1,), "rank 1 shares its core with another process (python, pid 812)",
    ),
    "shared core on a busy machine": (
        lambda: judged(
            CLEAN, CLEAN, uses=[Processors(0.35, 1, 6.0, 3.5), Processors(0.5, 1, 5.0, 5.0, HOG)]
        ),
        "shared core", (1,), "rank 1 shares its core with another process (python, pid 812)",
    ),
    "threads": (
        lambda: judged(CLEAN, CLEAN, uses=[Processors(0.4, 8, 10.0, 60.0)] * 2),
        "threads", (), "8 threads per process on 2 cores",
    ),
    "a limit": (
        lambda: judged(CLEAN, CLEAN, machine=Machine(2, throttled_share=0.4)),
        "throttled", (), "the control group's limit pauses the ranks 40 % of the time",
    ),
    "stolen": (
        lambda: judged(CLEAN, CLEAN, machine=Machine(2, stolen_share=0.3)),
        "stolen", (), "the host withholds 30 % of this virtual machine's processor time",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_is_named_with_ranks_and_numbers(name: str) -> None:
    judge, kind, ranks, text = CAUSES[name]
    cause = judge()
    assert cause is not None
    assert (cause.kind, cause.ranks) == (kind, ranks)
    assert text in cause.text


NO_CAUSES: dict[str, Callable[[], Cause | None]] = {
    "clean": lambda: judged(CLEAN, CLEAN),
    "one rank": lambda: judged(CLEAN),
    "all wait for processors": lambda: judged(CLEAN, CLEAN, uses=[BUSY, BUSY]),
    "all share theirs": lambda: judged(CLEAN, CLEAN, uses=[Processors(0.5, 1, 5.0, 5.0, HOG)] * 2),
    "a process that may go elsewhere, on a busy machine": lambda: judged(
        CLEAN, CLEAN,
        uses=[Processors(0.35, 1, 6.0, 3.5), Processors(0.5, 1, 5.0, 5.0, Neighbour(812, "python", 0.5))],
    ),
    "one waits, for reasons unknown": lambda: judged(CLEAN, CLEAN, uses=[QUIET, BUSY]),
    "threads of gloo on a busy machine": lambda: judged(CLEAN, CLEAN, uses=[Processors(0.6, 3, 3.0, 9.0)] * 2),
    "several threads that do not wait": lambda: judged(CLEAN, CLEAN, uses=[Processors(0.1, 4, 30.0, 2.0)] * 2),
    "one rank is slow for its own reason": lambda: judged(WAITING, times({SpanKind.BACKWARD: 0.3})),
    "longer batches that cost nothing": lambda: judged(
        CLEAN, times({SpanKind.DATA: 0.05, SpanKind.BACKWARD: 0.55, SpanKind.OPTIMIZER: 0.1}, elements=3000.0)
    ),
    "one evaluation": lambda: all_alike({}, counts={SpanKind.EVALUATION: 1}, evaluated_s=8.0, batches=400.0),
    "a save now and then": lambda: all_alike({SpanKind.SAVE: 0.3}, counts={SpanKind.SAVE: 1}),
    "a device that never waits": lambda: find_cause(
        {0: times({SpanKind.DATA: 0.6})}, {0: Processors(device_use=0.95)}, MACHINE
    ),
    "steps of a toy": lambda: find_cause(
        {0: StepTimes(10_000, 10.0, {SpanKind.DATA: 6.0}, {SpanKind.DATA: 10_000})}, {0: QUIET}, MACHINE
    ),
    "nothing known": lambda: find_cause({}, {}, MACHINE),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_CAUSES)
def test_no_cause_is_named_if_nothing_can_be_changed(name: str) -> None:
    assert NO_CAUSES[name]() is None


def _spans() -> list[Span]:
    """Return ten steps of one second: 0.2 s for data, a backward pass with 0.1 s of garbage collection, an
    optimizer, a collective.
    """
    place = COLLECTIVES.index("broadcast")
    spans: list[Span] = []
    for step in range(10):
        parts = [
            (SpanKind.DATA, 2, 500.0, 0.0, 0.2), (SpanKind.GARBAGE, 0, 0.0, 0.5, 0.6),
            (SpanKind.BACKWARD, 0, 0.0, 0.4, 0.7), (SpanKind.COLLECTIVE, place, 0.0, 0.7, 0.75),
            (SpanKind.OPTIMIZER, 0, 0.0, 0.8, 0.9),
        ]  # fmt: skip
        for kind, detail, value, began_s, ended_s in parts:
            spans.append(Span(kind, detail, value, step + began_s, step + ended_s, len(spans) + 1))
    return spans


def test_nested_spans_are_counted_once() -> None:
    own = step_times(_spans())
    assert own is not None
    assert own.num_steps == 9
    assert own.period_s == pytest.approx(9.0)
    wanted = {"DATA": 0.2, "BACKWARD": 0.2, "GARBAGE": 0.1, "COLLECTIVE": 0.05, "OPTIMIZER": 0.1}
    assert {kind.name: own.per_step_s(kind) for kind in own.seconds} == pytest.approx(wanted)
    assert own.own_s == pytest.approx(0.35)
    assert (own.num_workers, own.elements, own.collective) == (2, 500.0, "broadcast")


def test_repeated_collections_in_a_step_count_once() -> None:
    """As after an epoch under torch's profiler, whose tables make the collector run many times."""
    spans = [span for span in _spans() if span.kind != SpanKind.GARBAGE]
    for step in (2, 6):
        for began_s in (step + 0.91, step + 0.93, step + 0.95, step + 0.97):
            spans.append(Span(SpanKind.GARBAGE, 0, 0.0, began_s, began_s + 0.01, len(spans) + 1))
    own = step_times(spans)
    assert own is not None
    assert own.counts[SpanKind.GARBAGE] == 2
    assert own.seconds[SpanKind.GARBAGE] == pytest.approx(0.08)


def test_the_closure_of_an_optimizer_is_not_the_optimizers_time() -> None:
    """Lightning computes forward and backward inside the optimizer's step."""
    spans: list[Span] = []
    for step in range(10):
        parts = [
            (SpanKind.OPTIMIZER, 0.0, 0.9),
            (SpanKind.BACKWARD, 0.5, 0.8),
            (SpanKind.COLLECTIVE, 0.6, 0.7),
        ]
        for kind, began_s, ended_s in parts:
            spans.append(Span(kind, 0, 0.0, step + began_s, step + ended_s, len(spans) + 1))
    own = step_times(spans)
    assert own is not None
    wanted = {"BACKWARD": 0.2, "COLLECTIVE": 0.1, "OPTIMIZER": 0.1}
    assert {kind.name: own.per_step_s(kind) for kind in own.seconds} == pytest.approx(wanted)


def test_few_steps_are_not_judged() -> None:
    assert step_times(_spans()[:20]) is None
    assert step_times([]) is None


# --- real jobs -------------------------------------------------------------------------------------------------------


class Notices:
    """A listener that collects the notes about slow steps.

    Args:
        cause: part of the note to wait for.
    """

    def __init__(self, cause: str) -> None:
        self.texts: list[str] = []
        self.is_named = threading.Event()
        self._cause = cause

    def on_event(self, event: Event) -> None:
        if isinstance(event, Note) and event.kind == "slow":
            self.texts.append(event.text)
            if self._cause in event.text:
                self.is_named.set()

    def on_readings(self, readings: Sequence[SlotReading]) -> None:
        """Ignore readings."""

    def close(self) -> None:
        """Stop waiting."""
        self.is_named.set()


def notices_of(function: Callable[[Any], None], seconds: float, cause: str = "") -> list[str]:
    """Run a loop until a notice names ``cause``, or for some seconds; return the notices."""
    listener = Notices(cause)
    spec = LaunchSpec(slow_programs.run, (function,), 2, backend="cpu")
    runner = JobRunner(spec, plan_launch(spec), [listener])

    def stop() -> None:
        listener.is_named.wait(seconds)
        runner.stop()

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        runner.run()
    finally:
        listener.is_named.set()
        thread.join()
    assert runner.outcome is not None
    assert runner.outcome.error is None
    return listener.texts


# Loops whose time shares do not depend on the machine's load; tests/benchmarks/slow_steps.py has all of them.
STEADY = (
    slow_programs.data_on_all_ranks,
    slow_programs.saves,
    thorough(slow_programs.evaluations, id="evaluations"),
    thorough(slow_programs.garbage, id="garbage"),
)


@pytest.mark.usefixtures("first_store")
@pytest.mark.parametrize("function", STEADY, ids=lambda one: str(one.__name__))
def test_a_real_job_gets_the_cause(
    function: Callable[[Any], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOW_FOLDER", str(tmp_path))
    cause = slow_programs.SLOW[function]
    texts = notices_of(function, slow_programs.MAX_S, cause)
    # If other programs run on the same cores, a notice about them may come first.
    assert [text for text in texts if cause in text], texts


@pytest.mark.usefixtures("first_store")
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_processes_bound_to_the_same_cores_count_together() -> None:
    first, second = Neighbour(1, "a", 0.2, is_pinned=True), Neighbour(2, "b", 0.3, is_pinned=True)
    both = first.joined_by(second)
    assert (both.pid, both.num_more) == (2, 1)
    assert both.use == pytest.approx(0.5)
    roaming = Neighbour(3, "c", 0.9)
    assert roaming.joined_by(both) == both == both.joined_by(roaming)
    assert roaming.joined_by(Neighbour(4, "d", 0.1)) == roaming


@pytest.mark.usefixtures("first_store")
def test_a_clean_job_gets_no_notice() -> None:
    # Other programs on the same cores, or on the host of this machine, are real causes.
    of_others = re.compile(r"shared with|the host of this virtual machine")
    assert [text for text in notices_of(slow_programs.plain, 15.0) if not of_others.search(text)] == []


@pytest.mark.usefixtures("first_store")
def test_the_check_can_be_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBLAUNCH_CHECKS", "-slow_steps")
    assert notices_of(slow_programs.data_on_all_ranks, 15.0) == []
