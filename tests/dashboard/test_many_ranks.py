"""Dashboards process events and readings of many ranks in batches: the display is the same, and the cost is small."""

from __future__ import annotations

import random
import time

import pytest

from nblaunch.dashboard.base import Pace, ViewingDashboard
from nblaunch.dashboard.fold import fold
from nblaunch.dashboard.view import JobView
from nblaunch.events import (
    AttemptStarted,
    Event,
    ExceptionInfo,
    Exited,
    Failed,
    JobEnded,
    LogLines,
    Note,
    Stalled,
    Started,
    StatusLine,
    WorkerState,
)
from nblaunch.wire.board import SlotReading

NUM_RANKS = 512
TICK_S = 0.1


class Recorded(ViewingDashboard):
    """Stores the views that it would draw."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        super().__init__(Pace(interval_s=0.2, slow_s=0.2, clock=lambda: self.now_s))
        self.drawn: list[JobView] = []
        self.draws_for_s = 0.0
        self.last = JobView()

    def tick(self, step: int, num_ranks: int) -> None:
        self.now_s += TICK_S
        self.on_readings([reading(rank, step) for rank in range(num_ranks)])

    def _draw(self) -> None:
        self.drawn.append(self._view)
        self.now_s += self.draws_for_s
        self._pace.note_published()

    def _draw_last(self, view: JobView) -> None:
        self.last = view


def reading(rank: int, step: int) -> SlotReading:
    return SlotReading(
        rank, WorkerState.TRAINING, step, 1000, 1, step, step_time_s=1.0 + step, steps_done=step
    )


def started(num_ranks: int) -> Recorded:
    dashboard = Recorded()
    dashboard.on_event(AttemptStarted(-1, time.time(), "train", num_ranks, "cpu", "fork"))
    for rank in range(num_ranks):
        dashboard.on_event(Started(rank, time.time(), pid=1))
    return dashboard


@pytest.mark.parametrize(("num_ranks", "most"), [(8, 55), (NUM_RANKS, 21)])
def test_many_ranks_are_drawn_less_often(num_ranks: int, most: int) -> None:
    dashboard = started(num_ranks)
    for step in range(1, 101):
        num_drawn = len(dashboard.drawn)
        dashboard.tick(step, num_ranks)
        for view in dashboard.drawn[num_drawn:]:
            assert {rank.step for rank in view.ranks} == {step}
    assert most / 2 < len(dashboard.drawn) <= most


@pytest.mark.parametrize(
    ("num_ranks", "draws_for_s", "most"), [(8, 0.02, 60), (NUM_RANKS, 0.04, 15), (NUM_RANKS, 10.0, 2)]
)
def test_slow_tables_of_many_ranks_are_drawn_less_often(
    num_ranks: int, draws_for_s: float, most: int
) -> None:
    dashboard = started(num_ranks)
    dashboard.draws_for_s = draws_for_s
    began_s = dashboard.now_s
    step = 0
    while dashboard.now_s < began_s + 12:
        dashboard.tick(step := step + 1, num_ranks)
    assert most / 2 <= len(dashboard.drawn) <= most


def test_the_last_reading_before_the_end_counts() -> None:
    dashboard = started(NUM_RANKS)
    for step in range(1, 13):  # the last readings are not drawn
        dashboard.tick(step, NUM_RANKS)
    assert {rank.step for rank in dashboard.drawn[-1].ranks} != {12}
    dashboard.on_event(JobEnded(-1, time.time()))
    dashboard.close()
    assert {rank.step for rank in dashboard.last.ranks} == {12}


def test_a_reading_clears_only_earlier_stalls() -> None:
    """A rank that has progressed is not stalled; a rank whose progress is read only later is."""
    dashboard = started(NUM_RANKS)
    dashboard.tick(1, NUM_RANKS)
    dashboard.on_event(Stalled(3, time.time(), for_s=30.0, where="cell 1, line 2"))
    dashboard.tick(2, NUM_RANKS)
    dashboard.on_event(Stalled(4, time.time(), for_s=30.0, where="cell 1, line 2"))
    dashboard.close()
    assert [rank.rank for rank in dashboard.last.ranks if rank.stall] == [4]


def test_a_failure_among_many_lines_is_shown_at_the_next_update() -> None:
    dashboard = started(NUM_RANKS)
    dashboard.tick(1, NUM_RANKS)
    dashboard.on_event(Failed(7, time.time(), ExceptionInfo("ValueError", "no", "")))
    for number in range(20 * NUM_RANKS):
        dashboard.on_event(LogLines(number % NUM_RANKS, time.time(), (f"line {number}",)))
    for step in range(2, 8):
        dashboard.tick(step, NUM_RANKS)
    view = dashboard.drawn[-1]
    assert [rank.rank for rank in view.ranks if rank.failure] == [7]
    assert {rank.num_lines for rank in view.ranks} == {20}
    assert view.ranks[-1].last_line == f"line {20 * NUM_RANKS - 1}"


@pytest.mark.parametrize("seed", range(30))
def test_events_in_a_batch_equal_single_events(seed: int) -> None:
    rng = random.Random(seed)
    view = fold(JobView(), AttemptStarted(-1, 1.0, "train", 4, "cpu", "fork"))
    events = [_drawn(rng, 2.0 + index) for index in range(60)]
    singly = view
    for event in events:
        singly = fold(singly, event)
    assert fold(view, *events) == singly


def _drawn(rng: random.Random, now_s: float) -> Event:
    rank = rng.randrange(4)
    return rng.choice(
        [
            LogLines(rank, now_s, tuple(f"{now_s} {line}" for line in range(rng.randrange(3)))),
            StatusLine(
                rank, now_s, rng.choice(["", " ", "\x1b[2K", f"{rng.randrange(100)}%", f"\x1b[1m{now_s}"])
            ),
            StatusLine(rank, now_s, f"epoch {now_s}"),
            Started(rank, now_s, pid=1),
            Note(rank, now_s, "a note"),
            Stalled(rank, now_s, for_s=1.0),
            *([Exited(rank, now_s)] if rng.random() < 0.2 else []),
        ]
    )
