"""Curves: thinned evenly, limited in size, with increasing steps."""

from __future__ import annotations

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


def test_restarted_step_numbers_continue() -> None:
    curve = Curve()
    for step in (0, 5, 0, 5, 20):
        curve = curve.extended(step, 1.0, 10)
    assert curve.xs == (0, 5, 6, 7, 20)


def _logged(view: JobView, attempt: int, steps: list[int | None]) -> JobView:
    view = fold(view, AttemptStarted(-1, 1.0, "train", 1, "cpu", "fork", attempt=attempt))
    for step in steps:
        view = fold(view, Metric(0, 1.0, step, {"accuracy": float(attempt)}))
    return view


def test_a_restart_has_its_own_curves() -> None:
    view = _logged(JobView(), 0, [0, 100, 200])
    assert _logged(view, 1, [100, 200]).curves["accuracy"].points() == [(100, 1), (200, 1)]
    assert _logged(view, 1, []).curves == {}


def test_an_empty_curve_has_no_points() -> None:
    assert Curve().points() == []
    assert Curve().extended(3, 0.5, 10).points() == [(3, 0.5)]
