"""Curves: thinned evenly, never beyond their size, never going back."""

from __future__ import annotations

import pytest

from nblaunch.dashboard.fold import fold
from nblaunch.dashboard.view import Curve, JobView
from nblaunch.events import AttemptStarted, Metric


def test_a_long_curve_is_thinned_and_covers_everything() -> None:
    curve = Curve()
    for step in range(1000):
        curve = curve.extended(step, step / 2, 10)
        assert len(curve.xs) == len(curve.ys) <= 10
    assert curve.xs[0] == 0
    assert {after - before for before, after in zip(curve.xs, curve.xs[1:], strict=False)} == {128}
    assert curve.points()[-1] == (999, 499.5)
    assert curve.num_seen == 1000


def test_steps_that_begin_anew_count_on() -> None:
    curve = Curve()
    for step in (0, 5, 0, 5, 20):
        curve = curve.extended(step, 1.0, 10)
    assert curve.xs == (0, 5, 6, 7, 20)


def _logged(view: JobView, attempt: int, steps: list[int | None]) -> JobView:
    view = fold(view, AttemptStarted(-1, 1.0, "train", 1, "cpu", "fork", attempt=attempt))
    for step in steps:
        view = fold(view, Metric(0, 1.0, step, {"accuracy": float(attempt)}))
    return view


@pytest.mark.parametrize(
    ("resumed", "expected"),
    [
        ([200, 300], [(0, 0), (100, 0), (200, 1), (300, 1)]),
        ([0, 100], [(0, 1), (100, 1)]),
        ([None, None], [(0, 1), (1, 1)]),
        ([500], [(0, 0), (100, 0), (200, 0), (300, 0), (400, 0), (500, 1)]),
    ],
)
def test_a_restart_goes_on_at_the_step_from_which_it_has_resumed(
    resumed: list[int | None], expected: list[tuple[int, int]]
) -> None:
    view = _logged(JobView(), 0, [0, 100, 200, 300, 400])
    assert _logged(view, 1, resumed).curves["accuracy"].points() == expected


def test_a_thinned_curve_keeps_the_points_before_a_restart_and_its_spacing() -> None:
    curve = Curve()
    for step in range(99):
        curve = curve.extended(step, 0.0, 10)
    resumed = curve.resumed_at(50, 1)
    assert resumed.points() == [(0, 0), (16, 0), (32, 0), (48, 0)]
    assert curve.resumed_at(98.5, 1).points() == curve.points()
    for step in range(50, 99):
        resumed = resumed.extended(step, 1.0, 10)
    assert resumed.points() == [
        *((step, 0) for step in (0, 16, 32, 48)), *((step, 1) for step in (50, 66, 82, 98))
    ]  # fmt: skip


def test_an_empty_curve_has_no_points() -> None:
    assert Curve().points() == []
    assert Curve().extended(3, 0.5, 10).points() == [(3, 0.5)]
