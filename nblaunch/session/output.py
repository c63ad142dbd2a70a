"""Reports on a session's command: shows its output and displays in the cell that is waiting for it.

    supervisor's thread ── events, readings ──> SessionOutput ── pump(), in the thread of the cell ──> dashboards

A kernel shows a thread's output below the cell that started the thread. Therefore, only the thread that runs the
current cell prints. Output that arrives between commands is kept for the next command.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from nblaunch.dashboard import Dashboard
from nblaunch.diagnosis import hang
from nblaunch.diagnosis.report import AttemptReport
from nblaunch.events import (
    AttemptStarted,
    CommandEvent,
    Displayed,
    Event,
    Exited,
    JobEnded,
    LogLines,
    Note,
    Started,
)
from nblaunch.wire import outbox
from nblaunch.wire.board import SlotReading, create_memory_file
from nblaunch.wire.outbox import RankResult

_MAX_KEPT = 10_000
"""Maximum number of events kept between commands; a rank's threads may print at any time."""

BUSY = "the session is running another command; wait for it, or call session.interrupt()"

_LONG_S = 2.0
"""Seconds after which the display of a command gets a row per rank."""


@dataclass
class CommandReport(AttemptReport):
    """The facts about one command in a session, collected from the ranks' events as for an attempt.

    Args:
        number: number of the command in its session; 0 = none.
        outboxes: rank -> memory file for its results, for all ranks that execute the command.
        begun: ranks that have begun the command.
        has_torch: whether a rank has imported torch.
    """

    number: int = 0
    outboxes: dict[int, int] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    has_torch: bool = False

    def add(self, event: Event) -> None:
        """Record an event from a rank, including the end of its process."""
        if isinstance(event, Started):
            self.begun.add(event.rank)
        if event.rank in self.outboxes:
            super().add(event)

    def open_outboxes(self, ranks: Iterable[int]) -> None:
        """Create the outboxes of the ranks that execute the command.

        Raises:
            OSError: this process has no descriptors left.
        """
        for rank in ranks:
            self.outboxes[rank] = create_memory_file(f"nblaunch-outbox-{rank}")

    @property
    def busy(self) -> set[int]:
        """The ranks that have neither finished the command nor died."""
        return self.outboxes.keys() - self.exits.keys()

    @property
    def unfinished(self) -> set[int]:
        """The ranks that have reported neither a value nor a failure."""
        return self.outboxes.keys() - self.returned.keys() - self.failed.keys()

    def results(self) -> dict[int, RankResult]:
        """Read the outboxes of the ranks that returned, or that sent their states after an interrupt."""
        return {
            rank: outbox.read(self.outboxes[rank], location, self.sent_states.get(rank, {}))
            for rank, location in sorted(self.value_locations.items())
        }

    def close(self) -> None:
        """Close the outboxes. Results that have been read stay valid."""
        while self.outboxes:
            os.close(self.outboxes.popitem()[1])


class SessionOutput:
    """Listens to the session's job, and keeps events until the cell shows them.

    Attributes:
        ended: rank -> event, for ranks whose process has ended.
        command: the current command, or the last one.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=_MAX_KEPT)
        self._readings: Sequence[SlotReading] = ()
        self._dashboards: Sequence[Dashboard] = ()
        self._open_rows: Callable[[], Sequence[Dashboard]] | None = None
        self._missed: list[Event] = []
        """The command's events from before its rows were opened; the rows show them, too."""
        self._due_s = 0.0
        self._job_end: JobEnded | None = None
        self._shown = threading.Lock()
        self.ended: dict[int, Exited] = {}
        self.command = CommandReport()
        self._asleep = threading.Lock()
        """Held until :meth:`wake` is called; the cell's thread waits for its release."""
        self._asleep.acquire()

    def on_event(self, event: Event) -> None:
        """Keep output, displays and notes; while a command is running, keep all events except the session job's own."""
        command = self.command  # read once, because another thread may replace it
        is_of_job = isinstance(event, (AttemptStarted, Started, JobEnded))
        if isinstance(event, CommandEvent):
            if event.number != command.number:  # an error in this process has ended its command
                return
            command.has_torch |= event.has_torch
            event = event.event
            command.add(event)
        elif isinstance(event, Exited):
            self.ended[event.rank] = event
            command.add(event)
        elif isinstance(event, JobEnded):
            self._job_end = event
        if isinstance(event, JobEnded) or (isinstance(event, Exited) and not command.busy):
            self.wake()
        is_output = isinstance(event, (LogLines, Displayed, Note))
        if isinstance(event, Note) and event.kind == "hang":
            self._due_s = 0.0  # so that the rows show it immediately
        if is_output or (self._dashboards and not is_of_job):
            self._events.append(event)

    def on_readings(self, readings: Sequence[SlotReading]) -> None:
        """Keep the state of ranks that have begun the command; other ranks still report on their previous command."""
        self._readings = [reading for reading in readings if reading.rank in self.command.begun]

    def progress(self) -> object:
        """Return counters of the ranks that have begun the command; progress changes one of them."""
        num_sent = [len(states) for states in self.command.sent_states.values()]
        now_s = time.monotonic()
        return num_sent, [hang.progress_of(now_s, reading, 0, 0) for reading in self._readings]

    def close(self) -> None:
        """Do nothing, because the cell shows the remaining events."""

    def wake(self, _runner: object = None) -> None:
        """Wake the thread that is waiting for the command."""
        with suppress(RuntimeError):  # not held: the thread of the cell is about to notice an earlier call
            self._asleep.release()

    def wait(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` seconds for all ranks to finish the command, or for one to wait for pdb input."""
        # Not a SimpleQueue: before Python 3.13, its get() waits forever if a signal handler outlasts the timeout.
        self._asleep.acquire(timeout=timeout_s)

    @contextmanager
    def shown_by(
        self,
        dashboards: Sequence[Dashboard],
        open_rows: Callable[[], Sequence[Dashboard]] | None = None,
    ) -> Iterator[None]:
        """Show events with ``dashboards`` when :meth:`pump` is called in the block, and once more at its end.

        Args:
            dashboards: dashboards used from the start.
            open_rows: returns dashboards that are added if the block takes a long time.

        Raises:
            RuntimeError: another thread is inside a ``with`` block of this method.
        """
        if not self._shown.acquire(blocking=False):
            raise RuntimeError(BUSY)
        self._dashboards, self._open_rows = dashboards, open_rows
        self._readings, self._missed = (), []  # the old ones belong to the previous command
        self._due_s = time.monotonic() + _LONG_S
        try:
            yield
            self.pump()
        finally:
            self._open_rows = None  # it refers to the session
            dashboards, self._dashboards = self._dashboards, ()
            self._shown.release()
            for dashboard in dashboards:
                dashboard.close()

    def pump(self) -> None:
        """Show the events that have arrived."""
        if self._open_rows is not None and time.monotonic() >= self._due_s:
            rows = self._open_rows()
            emit(rows, self._missed)
            self._dashboards = [*rows, *self._dashboards]
            self._open_rows = None
        while self._events:
            event = self._events.popleft()
            emit(self._dashboards, [event])
            if self._open_rows is not None and not isinstance(event, (LogLines, Displayed)):
                self._missed.append(event)
        for dashboard in self._dashboards:
            dashboard.on_readings(self._readings)

    def show_end(self) -> None:
        """Show how the session's job ended, and with it the running command, if any."""
        if not self._dashboards:
            return
        self.pump()
        emit(self._dashboards, [*self.ended.values(), *filter(None, [self._job_end])])


def emit(shown: Sequence[Dashboard], events: Iterable[Event]) -> None:
    """Send events to the dashboards of a command."""
    for event in events:
        for dashboard in shown:
            dashboard.on_event(event)
