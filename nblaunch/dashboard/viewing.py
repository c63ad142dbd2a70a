"""What dashboards that draw a view have in common: they fold what they are told, and draw it when it is time."""

from __future__ import annotations

import abc
from collections.abc import Sequence

from nblaunch.dashboard.base import Dashboard, Pace
from nblaunch.dashboard.view import JobView
from nblaunch.dashboard.view_events import fold
from nblaunch.dashboard.view_samples import fold_samples
from nblaunch.events import Event, JobFinished, JobStarted
from nblaunch.wire.board import Sample


class ViewingDashboard(Dashboard):
    """Keeps the view of a job. Final classes draw it.

    Args:
        pace: when to draw.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._view = JobView()
        self._is_closed = False

    def on_event(self, event: Event) -> None:
        if isinstance(event, JobStarted) and not self._view.is_started:
            self._pace.restart()
        self._view = fold(self._view, event)

    def on_samples(self, samples: Sequence[Sample]) -> None:
        if self._is_closed or not self._view.is_started:
            return
        self._view = fold_samples(self._view, samples, self._view.started_s + self._pace.elapsed_s)
        # Once the job is over, close() is near and draws the final table.
        if not self._view.is_over and self._pace.is_due():
            self._draw()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._draw_last(_broken_off(self._view))

    @abc.abstractmethod
    def _draw(self) -> None:
        """Show ``self._view``, for it is time, and tell the pace."""

    @abc.abstractmethod
    def _draw_last(self, view: JobView) -> None:
        """Show how the job ended; ``view`` may be of one that never started."""


def _broken_off(view: JobView) -> JobView:
    """``view``, as cancelled if nobody said how the job ended: closing is then all that is known."""
    return view if view.is_over else fold(view, JobFinished(-1, view.now_s, outcome="cancelled"))
