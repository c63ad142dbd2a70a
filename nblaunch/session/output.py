"""What the ranks of a session print and display, shown in the cell that waits for them.

    supervisor's thread ── events, readings ──> SessionOutput ── pump(), in the thread of the cell ──> dashboards

A kernel shows what a thread prints below the cell that started the thread, so that only the thread of the present cell
may print. What arrives while no command runs is kept for the next one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from nblaunch.dashboard import Dashboard
from nblaunch.events import Displayed, Event, LogLines, Note
from nblaunch.wire.board import SlotReading

_MAX_KEPT = 10_000
"""Events between two commands; threads of a rank may print at any time."""


class SessionOutput:
    """A listener of the session's job, which keeps what arrives until the cell takes it."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=_MAX_KEPT)
        self._readings: Sequence[SlotReading] = ()
        self._dashboards: Sequence[Dashboard] = ()

    def on_event(self, event: Event) -> None:
        """Keep what ranks print and display, and notes."""
        if isinstance(event, (LogLines, Displayed, Note)):
            self._events.append(event)

    def on_readings(self, readings: Sequence[SlotReading]) -> None:
        """Keep the state of every rank."""
        self._readings = readings

    def close(self) -> None:
        """Do nothing: the cell takes what is left."""

    @contextmanager
    def shown_by(self, dashboards: Sequence[Dashboard]) -> Iterator[None]:
        """Show by ``dashboards`` what :meth:`pump` takes while the block runs, and all of it at its end."""
        self._dashboards = dashboards
        try:
            yield
            self.pump()
        finally:
            self._dashboards = ()
            for dashboard in dashboards:
                dashboard.close()

    def pump(self) -> None:
        """Show what has arrived."""
        while self._events:
            event = self._events.popleft()
            for dashboard in self._dashboards:
                dashboard.on_event(event)
        for dashboard in self._dashboards:
            dashboard.on_readings(self._readings)
