"""The displayed time left, from ten readings of the board per second, in jobs whose steps are known in advance."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

import pytest

from nblaunch.dashboard.fold import fold_readings
from tests.dashboard.scenes import START_S, sample, started, view_of

Announced = list[tuple[float, float | None]]
"""Seconds since the start, and the time left displayed at that moment."""


def announced(
    steps_s: list[float],
    per_epoch: int,
    begin_s: float = 0.0,
    counts_all: bool = False,
    is_stream: bool = False,
) -> Announced:
    """Return a dashboard's forecasts for one rank until its last step.

    Args:
        steps_s: seconds of each step. A step ends when the loop takes the next batch.
        per_epoch: steps per epoch.
        begin_s: seconds from the start of the loop to its first batch.
        counts_all: whether a framework counts the steps of the whole training run.
        is_stream: whether the loader does not know its number of batches.
    """
    view = view_of(started(1))
    taken_s = list(accumulate(steps_s[:-1], initial=begin_s))  # times at which the loop takes a batch
    num_epochs = len(steps_s) // per_epoch
    total = -1 if is_stream else per_epoch
    shown: Announced = []
    for tick in range(int((taken_s[-1] + steps_s[-1]) * 10)):
        now_s = tick / 10
        num_taken = bisect_right(taken_s, now_s)
        epoch = max(num_taken - 1, 0) // per_epoch + 1
        reading = sample(
            0, num_taken - (epoch - 1) * per_epoch, total,
            epoch=epoch, num_epochs=num_epochs, loop=epoch, steps_done=num_taken,
            step_time_s=5.0 + (taken_s[num_taken - 1] if num_taken else 0.0),
            trained=(per_epoch, total, epoch - 1) if epoch > 1 else (0, 0, 0),
            job_steps=(max(num_taken - 1, 0), len(steps_s)) if counts_all else (0, 0),
        )  # fmt: skip
        view = fold_readings(view, [reading], START_S + now_s)
        shown.append((now_s, view.left_s))
    return shown


def largest_error(
    shown: Announced, steps_s: list[float], begin_s: float = 0.0, first_share: float = 0.1
) -> float:
    """Return the largest error of forecasts, as a share of the time left.

    Args:
        shown: the forecasts.
        steps_s: seconds of each step.
        begin_s: seconds before the first step.
        first_share: share of the steps after which forecasts count; forecasts in the second half don't.
    """
    num_steps, total_s = len(steps_s), begin_s + sum(steps_s)
    first_s = begin_s + sum(steps_s[: int(num_steps * first_share)])
    last_s = begin_s + sum(steps_s[: num_steps // 2])
    part = [(at_s, left_s) for at_s, left_s in shown if first_s <= at_s <= last_s]
    assert all(left_s is not None for _, left_s in part)
    return max(abs((left_s or 0.0) / (total_s - at_s) - 1) for at_s, left_s in part)


@pytest.mark.parametrize("counts_all", [False, True])
@pytest.mark.parametrize(
    ("first_s", "step_s", "num_epochs", "begin_s"),
    [(0.16, 0.035, 6, 0.2), (5.0, 0.1, 10, 0.0), (0.1, 0.1, 4, 0.5), (20.0, 1.0, 20, 1.0)],
    ids=["first backward", "compilation", "workers of the loader", "slow steps"],
)
def test_slow_first_steps_do_not_affect_the_forecast(
    first_s: float, step_s: float, num_epochs: int, begin_s: float, counts_all: bool
) -> None:
    steps_s = [first_s] + [step_s] * (20 * num_epochs - 1)
    assert largest_error(announced(steps_s, 20, begin_s, counts_all), steps_s, begin_s) < 0.2


@pytest.mark.parametrize("at_step", [3, 5, 8])
def test_one_pause_does_not_affect_the_forecast(at_step: int) -> None:
    steps_s = [0.12] * 60
    steps_s[at_step] = 1.0
    assert largest_error(announced(steps_s, 60), steps_s, first_share=0.25) < 0.1


def test_recurring_pauses_are_forecast() -> None:
    steps_s = [1.0 if step % 5 == 4 else 0.1 for step in range(100)]
    assert largest_error(announced(steps_s, 100), steps_s, first_share=0.2) < 0.2


def test_the_first_batch_gives_no_forecast() -> None:
    """The loop takes its first batch at once, and then compiles the step for half a minute."""
    shown = announced([30.0, *[0.5] * 99], 100, 0.01)
    assert {left_s for at_s, left_s in shown if at_s <= 30.0} == {None}


def test_a_stream_is_forecast_by_its_last_epoch() -> None:
    steps_s = [0.1] * 200
    shown = announced(steps_s, 20, is_stream=True)
    assert {left_s for at_s, left_s in shown if at_s < 1.9} == {None}
    assert largest_error(shown, steps_s, first_share=0.11) < 0.2
