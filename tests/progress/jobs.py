"""Jobs on one machine without a dashboard: the views that a dashboard would have at each moment, and at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nblaunch.dashboard.fold import fold, fold_readings
from nblaunch.dashboard.view import JobView
from nblaunch.events import Event
from nblaunch.launcher.plan import plan_launch
from nblaunch.launcher.runner import JobRunner
from nblaunch.spec import LaunchSpec
from nblaunch.wire.board import SlotReading


class Views:
    """A listener that keeps the view of a job, and reports each view.

    Args:
        note: called with each view while the job runs.
    """

    def __init__(self, note: Callable[[JobView], None] = lambda view: None) -> None:
        self.view = JobView()
        self._note = note

    def on_event(self, event: Event) -> None:
        self.view = fold(self.view, event)

    def on_readings(self, readings: Sequence[SlotReading]) -> None:
        import time

        self.view = fold_readings(self.view, readings, time.time())
        if self.view.is_started and not self.view.is_over:
            self._note(self.view)

    def close(self) -> None:
        """Do nothing, because nothing is open."""


def run_job(
    function: Callable[..., Any],
    *args: Any,
    ranks: int = 2,
    note: Callable[[JobView], None] = lambda view: None,
) -> tuple[JobView, list[Any]]:
    """Run a function in workers; return the last view of the job, and the ranks' values."""
    views = Views(note)
    spec = LaunchSpec(function, args, ranks, backend="cpu", return_all=True)
    runner = JobRunner(spec, plan_launch(spec), [views])
    runner.run()
    value = runner.result()
    return views.view, list(value)
