"""A rank's rates, computed from readings of the board over the last few seconds, and forecasts based on them.

The first steps of a loop take longer than later ones, because loaders start their workers and kernels are compiled.
These first steps are used only until there are later ones. A forecast also leaves out a single long step, because one
pause does not show when the next will come. Repeated pauses are part of the mean.
"""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import NamedTuple

from nblaunch.wire.board import SlotReading

WINDOW_S = 10.0
"""Seconds over which rates are averaged."""

Rates = tuple[float | None, float | None, float | None]
"""Steps and samples per second, and seconds per step, excluding waits for other ranks."""

_MAX_SPACING_S = 0.5
_NUM_SPACES = 20  # between the points of a full window
_MIN_STEPS = 3  # for a rate, even if these steps take longer than the window
_WARM_UP_STEPS = 2
_MIN_INTERVALS = 4  # with fewer, a pause looks the same as uneven steps


class RatePoint(NamedTuple):
    """A point in the window over which rates are averaged. ``time_s`` is the time on the worker's monotonic clock.

    ``is_first``: whether the steps after this point are the first of a loop.
    """

    time_s: float
    steps: int
    samples: int
    busy_time_s: float = 0.0
    busy_steps: int = 0
    is_first: bool = False


def with_point(points: tuple[RatePoint, ...], reading: SlotReading) -> tuple[RatePoint, ...]:
    """Return ``points`` with a new last point; drop points that are too close together or older than the window.

    If steps take seconds, enough points are kept to compare a rate with another rank's.
    """
    if reading.step_time_s <= 0 or (points and reading.step_time_s <= points[-1].time_s):
        return points
    newest = RatePoint(
        reading.step_time_s,
        reading.steps_done,
        reading.samples,
        reading.busy_time_s,
        reading.busy_steps,
        is_first=not points,
    )
    if is_warming_up(points):
        warm = tuple(point for point in points if point.steps - points[0].steps >= _WARM_UP_STEPS)
        return (*(warm or points), newest)
    # The last point is replaced until it is far enough from the previous one.
    if len(points) >= 2:
        spacing_s = min(_MAX_SPACING_S, (newest.time_s - points[0].time_s) / _NUM_SPACES)
        if points[-1].time_s - points[-2].time_s < spacing_s:
            points = points[:-1]
    while len(points) > _MIN_STEPS and newest.time_s - points[1].time_s >= WINDOW_S:
        points = points[1:]
    return (*points, newest)


def is_warming_up(points: tuple[RatePoint, ...]) -> bool:
    """Return whether the points still contain the first steps of a loop."""
    return bool(points) and points[0].is_first


def rates_of(points: tuple[RatePoint, ...], last: Rates) -> Rates:
    """Return the rates over the window, or ``last`` while a new loop has too few steps."""
    steps_per_s, samples_per_s, busy_step_s = last
    if not points:
        return last
    first, newest = points[0], points[-1]
    if newest.steps - first.steps >= (_WARM_UP_STEPS if first.is_first else 1):
        span_s, num_samples = newest.time_s - first.time_s, newest.samples - first.samples
        steps_per_s = (newest.steps - first.steps) / span_s
        samples_per_s = num_samples / span_s if num_samples > 0 else None
    if newest.busy_steps > first.busy_steps:
        num_steps = newest.busy_steps - first.busy_steps
        busy_step_s = max(newest.busy_time_s - first.busy_time_s, 0.0) / num_steps
    return steps_per_s, samples_per_s, busy_step_s


def pause_s(points: tuple[RatePoint, ...]) -> float:
    """Return how many seconds longer than usual one interval between points is; 0.0 if none or several stand out."""
    intervals = [(then.time_s - at.time_s, then.steps - at.steps) for at, then in pairwise(points)]
    if len(intervals) < _MIN_INTERVALS:
        return 0.0
    usual_s = median(span_s / num_steps if num_steps else span_s for span_s, num_steps in intervals)
    second_s, longest_s = sorted(span_s - num_steps * usual_s for span_s, num_steps in intervals)[-2:]
    return longest_s if longest_s > 2 * max(second_s, 0.0) else 0.0


def warm_up(before: tuple[RatePoint, ...], after: tuple[RatePoint, ...]) -> tuple[float, int]:
    """Return the duration and number of the first steps if a new point ended the warm-up; otherwise return zeros.

    Args:
        before: the points without the new one.
        after: the points with it.
    """
    if not is_warming_up(before):
        return 0.0, 0
    return after[0].time_s - before[0].time_s, after[0].steps - before[0].steps
