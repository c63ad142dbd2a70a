"""Notices about slow and stalled ranks, from handwritten samples."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from nblaunch.dashboard.fold import fold, fold_readings
from nblaunch.dashboard.notices import STALLED_S, notices
from nblaunch.dashboard.table import tabulate
from nblaunch.dashboard.text import render_text
from nblaunch.dashboard.view import JobView
from nblaunch.events import JobEnded, LogLines, Note, Stalled, WorkerState
from tests.dashboard.scenes import START_S, ended, killed, raised, sample, started, trained, view_of


def at_rates(rates: Sequence[float], seconds: float = 10.0, total: int = 1000) -> JobView:
    """Return samples of ranks with these steps per second."""
    view = view_of(started(len(rates)))
    ticks = round(seconds * 2)
    for tick in range(ticks + 1):
        readings = [
            sample(rank, int(per_s * tick / 2), total, step_time_s=5 + int(per_s * tick / 2) / per_s)
            for rank, per_s in enumerate(rates)
        ]
        view = fold_readings(view, readings, START_S + tick / 2)
    return view


def waiting(
    view: JobView, ranks: Sequence[int], now_s: float, state: WorkerState = WorkerState.WAITING
) -> JobView:
    readings = [replace(view.ranks[rank].reading, state=state) for rank in ranks]  # type: ignore[type-var]
    return fold_readings(view, readings, START_S + now_s)  # type: ignore[arg-type]


def texts(view: JobView) -> list[str]:
    return [notice.text for notice in notices(view)]


def test_equal_ranks_get_no_notice() -> None:
    assert notices(at_rates([10, 10, 9.5, 10.2])) == ()
    assert notices(view_of(started(4))) == ()
    assert notices(JobView()) == ()


def test_a_slow_rank_is_named_with_its_delay() -> None:
    view = at_rates([10, 10, 5.55, 10])
    (notice,) = notices(view)
    assert (notice.kind, notice.ranks) == ("slow", (2,))
    assert notice.text == "rank 2: 1.8 times slower than the others (5.55 vs. 10.0 steps/s)"
    assert notice.text in render_text(view)


def test_a_slow_rank_is_named_where_steps_take_many_seconds() -> None:
    """Three steps are compared, however long they take; the first two are warm-up."""
    assert texts(at_rates([0.2, 0.2, 0.1, 0.2], seconds=55)) == [
        "rank 2: 2.0 times slower than the others (0.100 vs. 0.200 steps/s)"
    ]


def test_a_slow_rank_stays_named_once_the_job_is_over() -> None:
    assert texts(view_of(ended(3), at_rates([10, 10, 5]))) == [
        "rank 2: 2.0 times slower than the others (5.00 vs. 10.0 steps/s)"
    ]


def test_the_slower_of_two_ranks_is_named() -> None:
    assert texts(at_rates([4, 8]))[0].startswith("rank 0: 2.0 times slower than the others ")


def test_several_slow_ranks_share_a_notice() -> None:
    assert texts(at_rates([10, 10, 5, 10, 4, 10]))[0].startswith(
        "ranks 2 and 4: 2.0 to 2.5 times slower than the others"
    )


def test_the_first_second_is_too_early_to_judge() -> None:
    assert notices(at_rates([10, 4], seconds=1)) == ()


@pytest.mark.parametrize("busy", [False, True], ids=["own rate", "in step"])
def test_a_rank_that_becomes_slow_is_named_within_four_seconds(busy: bool) -> None:
    """Rank 2 takes 50 ms per step, and 250 ms from the tenth second on; in lockstep, the others wait for it."""
    view, named_s = view_of(started(4)), None
    steps, busy_s = [0.0] * 4, [0.0] * 4
    for tick in range(1, 60):
        now_s = tick / 4
        for rank in range(4):
            step_s = 0.25 if now_s > 10 and (rank == 2 or busy) else 0.05
            steps[rank] += 0.25 / step_s
            busy_s[rank] += 0.25 / step_s * (0.25 if now_s > 10 and rank == 2 else 0.05)
        readings = [
            sample(rank, round(steps[rank]), 10_000, step_time_s=5 + now_s, busy_time_s=busy_s[rank] * busy,
                   busy_steps=round(steps[rank]) * busy)
            for rank in range(4)
        ]  # fmt: skip
        view = fold_readings(view, readings, START_S + now_s)
        slow = [notice.ranks for notice in notices(view) if notice.kind == "slow"]
        assert slow in ([], [(2,)])
        assert not slow or now_s > 10
        named_s = named_s or (now_s if slow else None)
    assert named_s is not None
    assert named_s <= 14


def in_step(busy_s: Sequence[float], step_s: float = 0.1) -> JobView:
    """Return samples of ranks that wait for each other at every step, after this many seconds of their own work."""
    view = view_of(started(len(busy_s)))
    for step in range(0, 101, 5):
        readings = [
            sample(rank, step, step_time_s=5 + step * step_s, busy_time_s=step * seconds, busy_steps=step)
            for rank, seconds in enumerate(busy_s)
        ]
        view = fold_readings(view, readings, START_S + step * step_s)
    return view


def test_lockstep_straggler_computes_longest() -> None:
    view = in_step([0.05, 0.05, 0.09, 0.05])
    assert [rank.steps_per_s for rank in view.ranks] == pytest.approx([10] * 4)
    (notice,) = notices(view)
    assert notice.ranks == (2,)
    assert notice.text == (
        "rank 2: 1.8 times slower than the others (90 vs. 50 ms per step without waits), "
        "which slows down all ranks"
    )


@pytest.mark.parametrize("seed", range(20))
def test_random_delays_name_no_slow_rank(seed: int) -> None:
    """Each rank computes for 20 ms per step, and loses the processor for 100 ms on average at every tenth step."""
    draw = random.Random(seed)
    view, now_s, busy_s = view_of(started(2)), 5.0, [0.0, 0.0]
    for step in range(1, 801):
        spent_s = [0.02 + (draw.random() < 0.1) * draw.expovariate(10) for _ in busy_s]
        busy_s = [before_s + more_s for before_s, more_s in zip(busy_s, spent_s, strict=True)]
        now_s += max(spent_s)
        readings = [
            sample(rank, step, step_time_s=now_s, busy_time_s=busy_s[rank], busy_steps=step)
            for rank in range(2)
        ]
        view = fold_readings(view, readings, START_S + now_s)
        assert notices(view) == ()


def test_a_slightly_slow_rank_is_named_after_a_whole_window() -> None:
    busy_s = [0.05, 0.05, 0.07]
    assert notices(in_step(busy_s, step_s=0.05)) == ()  # five seconds
    assert texts(in_step(busy_s))[0].startswith("rank 2: 1.4 times slower than the others (70 vs. 50 ms")


def test_slowness_without_waits_is_not_reported() -> None:
    assert notices(in_step([0.004, 0.004, 0.009])) == ()
    assert notices(in_step([0.09, 0.09, 0.09])) == ()


def test_a_silent_rank_is_stalled_and_others_wait() -> None:
    view = waiting(trained(4), (0, 2, 3), 11)
    assert texts(fold_readings(view, [], START_S + 25)) == []
    view = fold_readings(view, [], START_S + 55)
    stalled = notices(view)[0]
    assert (stalled.kind, stalled.ranks) == ("stalled", (1,))
    assert stalled.text == "rank 1: no progress for 45 s"


def test_output_counts_as_progress() -> None:
    view = waiting(trained(2), (0,), 11)
    view = view_of([LogLines(1, START_S + 50, lines=("still here",))], view)
    assert texts(fold_readings(view, [], START_S + 55)) == []


def test_stalls_of_all_ranks_are_reported() -> None:
    view = fold_readings(trained(4), [sample(2, 99)], START_S + 10)
    view = fold_readings(view, [], START_S + 70)
    assert texts(view) == ["ranks 0-3: no progress for 1:00"]
    view = waiting(trained(2), (0, 1), 11)
    assert texts(fold_readings(view, [], START_S + 41)) == ["ranks 0 and 1: no progress for 30 s"]


def test_slow_steps_are_not_a_hang() -> None:
    view = at_rates([0.1, 0.1], seconds=40)
    assert texts(fold_readings(view, [], START_S + 40 + 2 * STALLED_S)) == []


@pytest.mark.parametrize("state", [WorkerState.COMPILING, WorkerState.FINISHING])
def test_compiling_is_not_a_stall(state: WorkerState) -> None:
    view = waiting(trained(2), (0, 1), 11, state)
    assert texts(fold_readings(view, [], START_S + 500)) == []


def test_notice_shows_positions_after_an_interrupt() -> None:
    report = Note(
        -1, START_S + 70, text="no progress for 60 s:\n    rank 1 is at cell 5, line 9", kind="hang"
    )
    stall = Stalled(1, START_S + 70, "cell 5, line 9", "", 60.0)
    view = fold_readings(view_of([report, stall], trained(2)), [], START_S + 71)
    assert notices(view)[0].lines == ("    rank 1 is at cell 5, line 9",)
    # the current position, as in the row, not the reported one
    assert notices(view)[0].text == "no progress for 1:01:"
    assert "rank 1 is at cell 5, line 9" in render_text(view)
    moved = fold_readings(view, [sample(1, 101)], START_S + 72)
    assert not any(notice.lines for notice in notices(moved))
    over = view_of([JobEnded(-1, START_S + 80, "interrupted")], view)
    assert [notice.text for notice in notices(over)] == ["no progress for 60 s:"]


def test_past_hangs_are_not_shown_again() -> None:
    report = Note(-1, START_S + 70, text="rank 1 may hang:\n    rank 1 is at cell 5, line 9", kind="hang")
    stalls = [
        Stalled(0, START_S + 70, "cell 5, line 14", "all_reduce", 60.0),
        Stalled(1, START_S + 70, "cell 5, line 9", "", 60.0, is_certain=False),
    ]
    view = fold_readings(view_of([*stalls, report], trained(2)), [], START_S + 71)
    # all ranks have returned, even if the board never showed it
    assert notices(view_of(ended(2), view)) == ()
    view = waiting(view, (0, 1), 72, WorkerState.RUNNING)
    # there was no step yet
    assert notices(view_of([JobEnded(-1, START_S + 80, "interrupted")], view))[0].lines
    view = fold_readings(view, [sample(rank, 101) for rank in range(2)], START_S + 73)
    assert notices(view_of([JobEnded(-1, START_S + 80, "failed", 0)], view)) == ()
    stall = Stalled(0, START_S + 120, "cell 5, line 20", "barrier", 40.0)
    waits = fold_readings(view_of([stall], view), [], START_S + 121)
    assert not any(notice.lines for notice in notices(waits))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_non_finite_loss_is_reported(value: float) -> None:
    view = fold_readings(trained(3), [sample(rank, 101, loss=value) for rank in (0, 1)], START_S + 10.1)
    assert texts(view) == [f"the loss on ranks 0 and 1 is {value}"]


def test_a_waiting_rank_is_shown_until_it_moves() -> None:
    view = view_of(
        [
            Stalled(0, START_S + 13, "cell 5, line 14", "all_reduce", 3.0),
            Stalled(1, START_S + 13, "cell 5, line 9", "", 3.0),
        ],
        trained(3),
    )
    view = fold_readings(view, [], START_S + 22)
    rows = tabulate(view).rows
    assert [row.state_text for row in rows] == [
        "1 no progress, 2 other", "waiting", "no progress", "training"
    ]  # fmt: skip
    assert [row.detail for row in rows[1:]] == [
        "waiting in all_reduce (cell 5, line 14)", "no progress for 12 s (cell 5, line 9)", ""
    ]  # fmt: skip
    assert notices(view)[0].ranks == (1,)
    view = fold_readings(view, [sample(rank, 101) for rank in range(2)], START_S + 22.1)
    assert [row.state_text for row in tabulate(view).rows] == ["training"] * 4


def test_a_rank_without_progress_has_no_rate_and_no_time_left() -> None:
    view = trained(2)
    moving = tabulate(fold_readings(view, [], START_S + 13))
    assert [row.cells for row in moving.rows] == [row.cells for row in tabulate(view).rows]
    still = tabulate(fold_readings(view, [], START_S + 43))
    cells = dict(zip(still.columns, still.rows[0].cells, strict=True))
    assert (cells["steps/s"], cells["samples/s"], cells["ETA"]) == ("0", "0", "")
    assert "ETA" not in still.setting
    assert "samples/s" not in still.setting
    assert [row.state_text for row in still.rows] == ["no progress"] * 3
    assert still.rows[1].detail == "no progress for 33 s"


def test_a_job_that_is_done_keeps_its_rates() -> None:
    view = fold_readings(view_of(ended(2, 60), trained(2)), [], START_S + 90)
    assert "10.0" in tabulate(view).rows[0].cells


def test_after_a_stopped_hang_only_the_culprit_failed() -> None:
    hang = Note(-1, START_S + 70, text="no progress for 60 s:\n    rank 1: cell 5, line 9", kind="hang")
    over = [
        hang,
        raised(0, "connection closed", is_consequence=True),
        killed(1, -9),
        JobEnded(-1, START_S + 75, "failed", 1, "did not enter the collective", has_hung=True),
    ]
    view = view_of(over, trained(2))
    assert [rank.state.name for rank in view.ranks] == ["STOPPED", "FAILED"]
    assert [failure[:2] for failure in tabulate(view).failures] == [
        ("rank 1", "did not enter the collective")
    ]
    assert notices(view) == ()  # the exception contains it


def test_the_reason_for_slow_steps_replaces_the_comparison() -> None:
    text = "batches on rank 2 are 1.8 times longer (1,800 vs. 1,000 elements)"
    view = fold(at_rates([10, 10, 5.55, 10]), Note(-1, START_S + 10, text=text, kind="slow"))
    (notice,) = notices(view)
    assert (notice.kind, notice.ranks, notice.text) == ("slow", (2,), text)
    assert render_text(view).count(text) == 1


def test_cause_for_all_ranks_is_shown_until_over() -> None:
    text = "62 % of each step is spent waiting for data on all ranks (num_workers=0)"
    view = fold(at_rates([10, 10]), Note(-1, START_S + 10, text=text, kind="slow"))
    assert texts(view) == [text]
    assert texts(fold(view, Note(-1, START_S + 20, text="", kind="slow"))) == []
    assert texts(fold(view, *started(2))) == []
