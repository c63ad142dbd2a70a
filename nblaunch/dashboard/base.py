"""Base classes for dashboards: listeners that a launcher calls to show a job.

``Dashboard`` is the interface, ``GuardedDashboard`` keeps a dashboard's errors away from the job, ``Pace`` limits the
rate of updates, and ``ViewingDashboard`` keeps the :class:`JobView` that subclasses draw.
"""

from __future__ import annotations

import abc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, final

from nblaunch.dashboard.fold import fold, fold_readings
from nblaunch.dashboard.view import JobView
from nblaunch.events import AttemptStarted, Controls, Event, Exited, Failed, JobEnded, Returned
from nblaunch.wire.board import SlotReading

_log = logging.getLogger(__name__)

Bundle = Mapping[str, Any]
"""MIME type -> data, as in ``display(..., raw=True)``."""

RATE_BYTES_S = 17_500.0
"""Bytes per second that a dashboard sends to a notebook. Together with the output of 8 workers, this makes about 22
kB/s.
"""


def uptime() -> float:
    """Return seconds on a clock that never jumps and that, like the clock for event times, keeps running while the
    machine is suspended.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class ShownJob(Controls, Protocol):
    """A job that dashboards can be connected to."""

    def show_with(self, show_again: Callable[[], bool]) -> None:
        """Store ``show_again``, which shows the job in the running cell and returns False if it can't."""


class Dashboard(abc.ABC):
    """A listener that shows a job.

    The launcher calls it from one thread at a time: ``on_event(AttemptStarted)``, then events of workers as they arrive
    and ``on_readings`` about ten times a second, ``on_event(JobEnded)``, then ``close``. If an error in this process
    ends a session's command, the launcher calls ``close`` without a ``JobEnded``.

    Methods with an empty body are optional. ``control`` and ``show_again`` are for dashboards with buttons, or with an
    output that several cells can show; they are called from the thread of a cell.
    """

    @abc.abstractmethod
    def on_event(self, event: Event) -> None:
        """Handle an event of the job."""

    def on_readings(self, readings: Sequence[SlotReading]) -> None:
        """Handle readings of the progress board, one per rank. Dashboards also publish at this point."""

    def close(self) -> None:
        """Show the final state of the job. Calls after the first do nothing."""

    def control(self, controls: Controls) -> None:
        """Connect buttons to the job; only a background job has buttons."""

    def show_again(self) -> bool:
        """Also show the job in the running cell; return False if there is nothing to show."""
        return False


@final
class GuardedDashboard(Dashboard):
    """A wrapper that switches a dashboard off at its first error.

    A job must not fail because its table could not be drawn (a closed output, a disconnected front end). The wrapper
    logs the error once, with its traceback, under ``nblaunch.dashboard.base``. It passes KeyboardInterrupt on.
    """

    def __init__(self, inner: Dashboard) -> None:
        self.inner = inner
        self._is_broken = False

    def on_event(self, event: Event) -> None:
        self._guard(self.inner.on_event, event)

    def on_readings(self, readings: Sequence[SlotReading]) -> None:
        self._guard(self.inner.on_readings, readings)

    def close(self) -> None:
        self._guard(self.inner.close)

    def control(self, controls: Controls) -> None:
        self._guard(self.inner.control, controls)

    def show_again(self) -> bool:
        return bool(self._guard(self.inner.show_again))

    def _guard(self, call: Callable[..., Any], *args: Any) -> Any:
        """Return the result of the call; None if it fails, or if a call has failed before."""
        if self._is_broken:
            return None
        try:
            return call(*args)
        except Exception:
            self._is_broken = True
            _log.warning(
                "%s failed and was turned off; the job continues without it",
                type(self.inner).__name__,
                exc_info=True,
            )
            return None


@final
class Pace:
    """The schedule of updates: the first after ``first_s`` seconds, then every ``interval_s`` seconds, and later every
    ``slow_s`` seconds.

    Updates slow down after ``slow_after_s``, so that a long job sends fewer messages to the front end. Large updates
    are published less often, because a remote front end has to download them.

    Args:
        first_s: seconds from the start to the first publication.
        interval_s: seconds between publications at first.
        slow_s: seconds between publications after ``slow_after_s``.
        slow_after_s: seconds from the start.
        clock: returns seconds on a clock that never jumps.
    """

    def __init__(
        self,
        *,
        first_s: float = 0.25,
        interval_s: float = 0.25,
        slow_s: float = 0.5,
        slow_after_s: float = 5.0,
        clock: Callable[[], float] = uptime,
    ) -> None:
        self._first_s = first_s
        self._interval_s = interval_s
        self._slow_s = slow_s
        self._slow_after_s = slow_after_s
        self._clock = clock
        self.restart()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started_s

    def restart(self, ago_s: float = 0.0) -> None:
        """Set the start time to the start of the job, ``ago_s`` seconds ago."""
        self._started_s = self._clock() - ago_s
        self._next_s = self._started_s + self._first_s

    def is_due(self) -> bool:
        """Return whether it is time to publish."""
        return self._clock() >= self._next_s

    def note_published(self, num_bytes: int = 0) -> None:
        """Record that ``num_bytes`` bytes are being published now."""
        now_s = self._clock()
        is_slow = now_s - self._started_s >= self._slow_after_s
        pause_s = self._slow_s if is_slow else self._interval_s
        self._next_s = now_s + max(pause_s, num_bytes / RATE_BYTES_S)


_LOOK_S_PER_RANK = 0.001
"""Minimum number of seconds between two folds of readings, per rank. There are at most ten folds a second with few
ranks, and at most two with 512 ranks.
"""

_MAX_SHARE = 0.05
_LONGEST_S_PER_RANK = 0.002
"""The pause between two folds is long enough for folding and drawing to take less than ``_MAX_SHARE`` of the time, but
it lasts at most ``_LONGEST_S_PER_RANK`` seconds per rank. A table of a few ranks is therefore always up to date, and a
table of 512 ranks changes at least once a second.
"""

_EVENTS_PER_RANK = 16
"""Number of waiting events per rank at which all waiting events are folded together."""


_ENDS = (AttemptStarted, Returned, Failed, Exited, JobEnded)
"""Events after which the board no longer shows the ranks' earlier progress, so waiting readings are folded first."""


class _Unread(NamedTuple):
    """Readings that have not been folded yet.

    They arrived ``at_s`` seconds after the start, when ``num_events`` events were waiting.
    """

    readings: Sequence[SlotReading]
    at_s: float
    num_events: int


class ViewingDashboard(Dashboard):
    """A dashboard that keeps the view of a job; subclasses draw it.

    It folds several events together. With many ranks, it skips readings, because later ones contain the same
    information.

    Args:
        pace: times of updates.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._view = JobView()
        self._events: list[Event] = []
        self._unread: _Unread | None = None
        self._next_look_s = 0.0
        self._is_closed = False

    def on_event(self, event: Event) -> None:
        if self._unread is not None and isinstance(event, _ENDS):
            self._catch_up()
        if isinstance(event, AttemptStarted) and not self._view.is_started:
            self._pace.restart(event.ago_s)
            self._next_look_s = 0.0
        self._events.append(event)
        if len(self._events) >= _EVENTS_PER_RANK * len(self._view.ranks):
            self._catch_up()

    def on_readings(self, readings: Sequence[SlotReading]) -> None:
        if self._is_closed:
            return
        at_s = self._pace.elapsed_s
        self._unread = _Unread(readings, at_s, len(self._events))
        if at_s < self._next_look_s:
            return
        self._catch_up()
        # close() draws the final table soon after the job has ended.
        if self._view.is_started and not self._view.is_over and self._pace.is_due():
            self._draw()
        num_ranks = len(self._view.ranks)
        pause_s = min(_LONGEST_S_PER_RANK * num_ranks, (self._pace.elapsed_s - at_s) / _MAX_SHARE)
        self._next_look_s = at_s + max(pause_s, _LOOK_S_PER_RANK * num_ranks)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._catch_up()
        self._draw_last(_as_cancelled(self._view))

    def _catch_up(self) -> None:
        """Fold the waiting events and readings in order of arrival."""
        events, unread = self._events, self._unread
        self._events, self._unread = [], None
        num_before = len(events) if unread is None else unread.num_events
        view = fold(self._view, *events[:num_before])
        if unread is not None and view.is_started:
            view = fold_readings(view, unread.readings, view.started_s + unread.at_s)
        self._view = fold(view, *events[num_before:])

    @abc.abstractmethod
    def _draw(self) -> None:
        """Show ``self._view``, and record in ``self._pace`` that it was published."""

    @abc.abstractmethod
    def _draw_last(self, view: JobView) -> None:
        """Show the outcome of the job, which may never have started."""


def _as_cancelled(view: JobView) -> JobView:
    """Return ``view``, marked as cancelled if no event has reported the outcome."""
    return view if view.is_over else fold(view, JobEnded(-1, view.now_s, outcome="cancelled"))
