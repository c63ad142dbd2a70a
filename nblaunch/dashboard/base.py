"""What a dashboard is to a launcher: a listener that shows a job.

Owns the abstract classes, the guard that keeps a broken dashboard from hurting a job, and the clock that paces
updates. Never draws anything itself.
"""

from __future__ import annotations

import abc
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol, final

from nblaunch.dashboard.fold import fold, fold_samples
from nblaunch.dashboard.view import JobView
from nblaunch.events import Event, JobFinished, JobStarted
from nblaunch.wire.board import Sample

_log = logging.getLogger(__name__)

RATE_BYTES_S = 15_000.0
"""What a dashboard sends to a notebook in a second. With what workers print, that is 20 kB/s for 8 of them."""


class Controls(Protocol):
    """Requests to a running job. Safe in any thread, and none of them waits."""

    def stop(self) -> None:
        """Let training end early and well."""

    def interrupt(self) -> None:
        """Interrupt every worker."""

    def cancel(self) -> None:
        """Kill every worker."""

    def ask_stacks(self) -> Future[str]:
        """Where every rank is, as text, within a second or so."""


class Dashboard(abc.ABC):
    """Shows a job.

    Called by the launcher, from one thread at a time: ``on_event(JobStarted)``, the workers' events as they come,
    ``on_samples`` about ten times a second and once at the end, ``on_event(JobFinished)``, then ``close``. ``close``
    may come early, with no ``JobFinished``, when the launch is broken off.

    ``control`` and ``show_again`` are for dashboards that have buttons, or an output that can be shown twice; they
    are called from the thread of a cell.
    """

    @abc.abstractmethod
    def on_event(self, event: Event) -> None:
        """Something happened."""

    @abc.abstractmethod
    def on_samples(self, samples: Sequence[Sample]) -> None:
        """The board, one sample per rank. Also the tick at which dashboards publish what they have gathered."""

    @abc.abstractmethod
    def close(self) -> None:
        """The job is over: show the final state. Calls after the first do nothing."""

    def control(self, controls: Controls) -> None:
        """The job goes on in the background: ``controls`` acts on it."""

    def show_again(self) -> bool:
        """Show the job in the running cell, too, now or after its end. False where there is nothing to show there."""
        return False


@final
class NullDashboard(Dashboard):
    """Shows nothing."""

    def on_event(self, event: Event) -> None:
        pass

    def on_samples(self, samples: Sequence[Sample]) -> None:
        pass

    def close(self) -> None:
        pass


@final
class GuardedDashboard(Dashboard):
    """Another dashboard, switched off at its first error.

    A job must not fail because its table could not be drawn (a closed output, a front end that went away). The error
    is logged once, with its traceback, under ``nblaunch.dashboard.base``. KeyboardInterrupt passes: it is the
    launcher's business.
    """

    def __init__(self, inner: Dashboard) -> None:
        self.inner = inner
        self._is_broken = False

    def on_event(self, event: Event) -> None:
        self._guard(lambda: self.inner.on_event(event))

    def on_samples(self, samples: Sequence[Sample]) -> None:
        self._guard(lambda: self.inner.on_samples(samples))

    def close(self) -> None:
        self._guard(self.inner.close)

    def control(self, controls: Controls) -> None:
        self._guard(lambda: self.inner.control(controls))

    def show_again(self) -> bool:
        return not self._is_broken and self.inner.show_again()

    def _guard(self, call: Callable[[], None]) -> None:
        if self._is_broken:
            return
        try:
            call()
        except Exception:
            self._is_broken = True
            _log.warning(
                "%s failed and is switched off; the job goes on without it",
                type(self.inner).__name__,
                exc_info=True,
            )


@final
class Pace:
    """When to publish: not before ``first_s``, then every ``interval_s``, later every ``slow_s`` seconds.

    The first seconds are watched closely; after ``slow_after_s`` a calmer table is as good, and a long job leaves
    fewer messages in the front end. What is large is published more rarely: a front end far away has to carry it.

    Args:
        first_s: seconds from the start to the first publication.
        interval_s: seconds between publications at first.
        slow_s: seconds between publications later on.
        slow_after_s: seconds from the start after which it is later.
        rate_bytes_s: bytes a second, over longer times.
        clock: seconds on a clock that never jumps.
    """

    def __init__(
        self,
        *,
        first_s: float = 0.25,
        interval_s: float = 0.25,
        slow_s: float = 0.5,
        slow_after_s: float = 5.0,
        rate_bytes_s: float = RATE_BYTES_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_s = first_s
        self._interval_s = interval_s
        self._slow_s = slow_s
        self._slow_after_s = slow_after_s
        self._rate_bytes_s = rate_bytes_s
        self._clock = clock
        self.restart()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started_s

    def restart(self) -> None:
        """The job starts now, not when the dashboard was built."""
        self._started_s = self._clock()
        self._next_s = self._started_s + self._first_s

    def is_due(self) -> bool:
        """Whether it is time to publish."""
        return self._clock() >= self._next_s

    def mark(self, num_bytes: int = 0) -> None:
        """Something was published now, so many bytes of it."""
        now_s = self._clock()
        is_slow = now_s - self._started_s >= self._slow_after_s
        pause_s = self._slow_s if is_slow else self._interval_s
        self._next_s = now_s + max(pause_s, num_bytes / self._rate_bytes_s)


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
        """Show ``self._view``, which is due, and mark the pace."""

    @abc.abstractmethod
    def _draw_last(self, view: JobView) -> None:
        """Show how the job ended; ``view`` may be of one that never started."""


def _broken_off(view: JobView) -> JobView:
    """Return ``view``, as cancelled if no event brought the outcome: closing is then all that is known."""
    return view if view.is_over else fold(view, JobFinished(-1, view.now_s, outcome="cancelled"))
