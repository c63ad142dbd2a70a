"""JobFollower: follows a detached job through the files in its folder, as a ``Job`` in this process with dashboards.

    attach ──> follow ──> JobFollower, one for each job and process: a thread, and a JobReader ──> all dashboards
                              ^ a dashboard that is added later gets past events from its own reader

The thread ends with the job, or with :meth:`JobFollower.detach`.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nblaunch import backends, env
from nblaunch.detached.folder import (
    END,
    RECORD,
    RESULT,
    WEIGHTS,
    JobError,
    JobFolder,
    Launch,
    Unusable,
    own_layout,
)
from nblaunch.detached.listing import KILLED, OTHER_LAYOUT, RESTARTED, ask
from nblaunch.detached.reader import JobReader
from nblaunch.detached.record import End
from nblaunch.detached.requests import Endpoint, RemoteRequests
from nblaunch.diagnosis.exceptions import annotate, rebuild
from nblaunch.errors import JobLost, ResultError
from nblaunch.events import AttemptStarted, Event, JobEnded, Note
from nblaunch.host import signal_handlers
from nblaunch.host.machine import ProcessState
from nblaunch.launcher.job import Job, Listener
from nblaunch.launcher.outcome import JobOutcome
from nblaunch.launcher.plan import LaunchPlan
from nblaunch.launcher.requests import Latch
from nblaunch.wire import exceptions
from nblaunch.wire.assignment import restore_sources
from nblaunch.wire.pickling import payload

_POLL_S = 0.1
_FIRST_LOOK_S = 5.0
_POLLS_PER_CHECK = 10
"""Number of file checks per check of the job process."""

_PATIENCE_S = 10.0
"""How long to wait for the thread to end."""

_REPLY_S = 2.0

_followers: dict[tuple[int, Path], JobFollower] = {}
"""Process and folder of a job -> its active follower. A forked process has none."""


def follow(folder: JobFolder, listeners: Sequence[Listener] = ()) -> JobFollower:
    """Return this process's follower of a job, and add listeners, which receive all events, including past ones.

    Raises:
        LookupError: it is not a job's folder, or the job can't be followed from here.
        OSError: the folder can't be read.
    """
    place = (os.getpid(), folder.path)
    while True:
        follower = _followers.get(place)
        if follower is not None and follower.show_on(listeners):
            return follower
        new = JobFollower(folder, listeners)
        if _followers.setdefault(place, new) is new:
            new.start()
            return new
        _followers.pop(place, None)  # the follower has ended in the meantime, or another thread was faster
        new.close()


class JobFollower(Job):
    """A job that another process runs.

    Args:
        folder: folder of the job.
        listeners: receive all of its events, including past ones.

    Raises:
        LookupError: it is not a job's folder, or the job can't be followed from here.
    """

    def __init__(self, folder: JobFolder, listeners: Sequence[Listener] = ()) -> None:
        self._record = folder.load_record()
        if folder.load_end() is None and folder.process_state(self._record) is ProcessState.ELSEWHERE:
            name = self._record.process.machine.name
            raise Unusable(
                f"on {name}", "", f"{folder.id} was launched on another machine, {name}: attach to it there"
            )
        if self._record.layout != own_layout():
            raise folder.of_another_version(self._record.head, OTHER_LAYOUT)
        launch = folder.load(Launch)
        if launch is None:
            raise Unusable("damaged", "", f"{folder.id} is damaged: {folder.path / 'launch'} is missing")
        restore_sources(launch.sources)
        folder = JobFolder(folder.path, patience_s=math.inf)  # a lack of descriptors does not end the job
        endpoint = Endpoint(folder.path, self._record.address)
        backend = backends.find(self._record.backend, launch.registered_backend)
        plan = LaunchPlan(backend=backend, modules={}, **launch.plan)
        super().__init__(launch.spec, plan, folder, RemoteRequests(endpoint), listeners)
        self.id = folder.id
        self._folder = folder
        self._endpoint = endpoint
        self._reader = JobReader(folder, self.ranks, self.emit, self.emit_readings)
        self._has_looked = Latch()
        self._thread: threading.Thread | None = None
        self._newcomers: deque[_Newcomer] = deque()
        self._is_detached = False
        self._waits_for = ""
        self._written_s: float | None = None
        self._has_seen_end = False

    def start(self) -> None:
        """Start a thread that follows the job to its end; return when its state is known, or after a short time."""
        self._thread = threading.Thread(target=self._follow, name=f"nblaunch-{self.id}", daemon=True)
        self._thread.start()
        self._has_looked.wait(_FIRST_LOOK_S)

    def show_on(self, listeners: Sequence[Listener]) -> bool:
        """Add listeners, which receive all events, past ones first; return False if this follower has ended."""
        newcomer = _Newcomer(listeners)
        self._newcomers.append(newcomer)
        try:
            while not newcomer.has_joined.wait(_POLL_S):
                if self._ended.is_set() or self._is_detached or not self._is_followed:
                    return newcomer.has_joined.is_set()
                signal_handlers.run_arrived()
        except BaseException:  # raised by a signal handler
            with suppress(ValueError):
                self._newcomers.remove(newcomer)
            raise
        return True

    def detach(self) -> None:
        """Stop following the job: its displays are closed and free their resources. The job continues."""
        self._is_detached = True
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(_PATIENCE_S)

    def ends_within(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds for the end; return whether the job has ended.

        Raises:
            RuntimeError: the job is no longer followed.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while not self._ended.is_set():
            if self._is_detached:
                raise RuntimeError(
                    f"the job {self.id} is no longer followed, because detach() was called; "
                    f"nblaunch.attach({self.id!r}) follows it again"
                )
            left_s = _POLL_S if deadline_s is None else min(_POLL_S, deadline_s - time.monotonic())
            if left_s <= 0:
                break
            self._ended.wait(left_s)
        return self._ended.is_set()

    def wait_for_start(self, interrupts: Sequence[float]) -> None:
        """Wait until the workers are running or the job has ended; after an interrupt, wait for the end.

        Args:
            interrupts: times of interrupts. A signal handler may add some during the wait; an interrupt ends the job.
        """
        is_over = False
        while not is_over:
            while self.requests.interrupts < len(interrupts):
                self.requests.interrupt()
            is_over = self.ends_within(_POLL_S) if interrupts else self._launch_settled.wait(_POLL_S)

    def close(self) -> None:
        """Close the files of a follower that was not started."""
        self._reader.close()

    @property
    def _is_followed(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    # --- the thread ----------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        try:
            self._follow_to_end()
        except BaseException as error:  # from a listener or from the files
            self._conclude(JobOutcome.of_error(error), JobEnded(outcome="failed", message=str(error)))
        finally:
            _followers.pop((os.getpid(), self._folder.path), None)
            self._has_looked.set()
            self._reader.close()

    def _follow_to_end(self) -> None:
        for num_polls in itertools.count():
            if self._is_detached:
                self._leave()
                return
            has_job_process = num_polls % _POLLS_PER_CHECK > 0 or self._look_at_process()
            # Read the events after that check: if the process has ended, no event can follow these.
            events = self._reader.read_events()
            if num_polls == 0:
                events = self._dated(events, has_job_process)
            for event in events:
                if isinstance(event, JobEnded):
                    self._end()
                    return
                self._handle(event)
            self._has_looked.set()
            self._reader.read_logs()
            self._reader.read_snapshot()
            if not has_job_process:
                self._end()
                return
            while self._newcomers:
                self._welcome(self._newcomers.popleft())
            time.sleep(_POLL_S)

    def _look_at_process(self) -> bool:
        """Return whether the job is running.

        Also ask its process why it is waiting, and reopen the files that the process has restored.
        """
        if self._folder.process_state(self._record) is not ProcessState.RUNS:
            return False
        if self._folder.modified(END) is not None:
            if self._has_seen_end:  # the last event, which is written right after this file, can't be read
                return False
            self._has_seen_end = True
        is_gone = not self._reader.has_all_files()
        written_s = self._reader.last_snapshot_s()  # several times a second, unless the disk is full
        is_quiet, self._written_s = written_s == self._written_s, written_s
        if is_gone or is_quiet or self._reader.has_ended_ranks:
            served = ask(self._endpoint, _REPLY_S)  # the process restores removed files before it answers
            waits_for = served.waits_for if served is not None else ""
            if waits_for != self._waits_for:
                self._waits_for = waits_for
                self.status = "waiting" if waits_for else "running"
                if waits_for:
                    self.emit(Note.of_job(f"{self.id} {waits_for}", "warning"))
            self._reader.tick()
        if is_gone:
            self._reader.follow_restored()
        return True

    def _dated(self, events: Sequence[Event], has_job_process: bool) -> list[Event]:
        """Return past events, and record how long before now, or before the job's end, each attempt started."""
        now_s = time.time()
        if events and isinstance(events[-1], JobEnded):
            now_s = events[-1].time_s
        elif not has_job_process:
            now_s = self._reader.last_snapshot_s() or now_s
        return [
            replace(event, ago_s=max(0.0, now_s - event.time_s))
            if isinstance(event, AttemptStarted)
            else event
            for event in events
        ]

    def _handle(self, event: Event) -> None:
        if isinstance(event, AttemptStarted):
            self._reader.read_logs_to_end()  # of the previous attempt
            self.attempt, self.pids = event.attempt, {}
            # The job process decides how its workers start; the rest of the plan comes from the launching process.
            self.plan = replace(
                self.plan, start_method=event.start_method, reason=event.reason, fallback=event.fallback
            )
        self._reader.handle(event)

    def _welcome(self, newcomer: _Newcomer) -> None:
        """Send past events to new listeners, then register these listeners for future events."""
        with self._reader.replay(newcomer.emit, newcomer.emit_readings) as reader:
            for event in self._dated(reader.read_events(), True):
                reader.handle(event)
            reader.catch_up()
        if self._waits_for:
            newcomer.emit(Note.of_job(f"{self.id} {self._waits_for}", "warning"))
        self._listeners.extend(newcomer.listeners)
        newcomer.has_joined.set()

    def _leave(self) -> None:
        """Close the displays even though the job continues."""
        self.emit(Note.of_job(f"nblaunch.attach({self.id!r}) follows the job again"))
        self.emit(JobEnded(-1, time.time(), outcome="left"))
        self._close_listeners()
        self._launch_settled.set()

    # --- the end -------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Determine from the files of the job process how the job ended, and report it."""
        try:
            end, problem = self._folder.load_end(), ""
        except Unusable as error:
            end, problem = None, str(error)
        self._reader.read_logs_to_end()
        self._reader.read_snapshot()
        if end is not None:
            outcome = _outcome_of(self._folder, end)
            ended = end.event
        else:
            text, headline = (
                (problem, "the record of its end can't be read") if problem else self._describe_loss()
            )
            outcome = JobOutcome("lost", JobLost(text), headline=headline)
            time_s = self._reader.last_snapshot_s() or time.time()
            ended = JobEnded(-1, time_s, "failed", message=outcome.message)
        self._conclude(outcome, ended)

    def _describe_loss(self) -> tuple[str, str]:
        """Return a description of a job whose end was not recorded, and a short version."""
        process = f"the process of {self.id} (pid {self._record.process.pid})"
        logs = f"Logs: {self._folder.path}"
        if self._folder.process_state(self._record) is ProcessState.RESTARTED:
            return (
                f"the machine was restarted while {self.id} was running: there is no result. {logs}",
                RESTARTED,
            )
        if not self._folder.path.exists():
            return (
                f"the folder of {self.id}, {self._folder.path}, was removed and its process has ended, so there is "
                "no result"
            ), "its folder was removed"
        if self._folder.modified(RECORD) is None:
            return (
                f"files of {self.id} were removed from {self._folder.path} when its process ended, so its outcome "
                f"is unknown and there is no result. {logs}"
            ), "its files were removed"
        last = f" It was waiting: {self._waits_for}." if self._waits_for else ""
        return (
            f"{process} was killed. Its workers ended with it, and there is no result.{last} Its last output is in "
            f"{self._folder.path / 'job.log'}. {logs}"
        ), KILLED

    def _conclude(self, outcome: JobOutcome, ended: JobEnded) -> None:
        self.status, self.outcome = outcome.status, outcome.with_traceback()
        try:
            self.emit(ended)
            self._close_listeners()
        finally:
            self._ended.set()
            self._launch_settled.set()


class _Newcomer:
    """Listeners that were added after the follower started."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self.listeners = listeners
        self.has_joined = Latch()

    def emit(self, event: Event) -> None:
        """Send a past event."""
        for listener in self.listeners:
            listener.on_event(event)

    def emit_readings(self, readings: Sequence[Any]) -> None:
        """Send readings of the board."""
        for listener in self.listeners:
            listener.on_readings(readings)


def _outcome_of(folder: JobFolder, end: End) -> JobOutcome:
    error = _error_of(folder, end)
    if error is None and end.unsaved:
        error = ResultError(end.unsaved)
    if isinstance(error, ResultError) and error.partial is None and end.partial_rank is not None:
        with suppress(ResultError):  # a class is missing here, which the error for the whole value reports
            error.partial = _load(folder, RESULT).get(end.partial_rank)
    elif error is not None and folder.modified(RESULT) is not None:  # some ranks returned before the end
        with suppress(ResultError):
            exceptions.set_attribute(error, "partial", _load(folder, RESULT))
    return JobOutcome(
        status=end.event.outcome,
        error=error,
        failed_rank=end.event.failed_rank,
        headline=end.event.message,
        is_early=end.event.is_early,
        values=_Stored(lambda: _load(folder, RESULT) if end.event.outcome == "done" else {}),
        unloaded_weights=_Stored(lambda: _load_weights(folder, end)),
    )


def _error_of(folder: JobFolder, end: End) -> BaseException | None:
    """Return the error that ended the job, with the frames and notes from the job process."""
    if end.unsaved_error:
        return JobLost(f"{end.event.message}\n{end.unsaved_error}")
    try:
        stored = folder.load(JobError)
    except Unusable as error:
        return JobLost(f"{end.event.message}\nthe error itself can't be read: {error}")
    if stored is None:
        if end.event.outcome == "done":
            return None
        return JobLost(f"{end.event.message}\nthe error itself, {folder.path / 'error'}, was removed")
    rebuilt = rebuild(stored.failed)
    if stored.notes is not None:
        exceptions.set_attribute(rebuilt, "__notes__", [])
        annotate(rebuilt, stored.failed.info, stored.notes)
    return rebuilt


class _Stored(Mapping[Any, Any]):
    """A mapping that is read from the job's folder on demand."""

    def __init__(self, load: Callable[[], Mapping[Any, Any]]) -> None:
        self._load = load

    @cached_property
    def _contents(self) -> Mapping[Any, Any]:
        return self._load()

    def __getitem__(self, key: Any) -> Any:
        return self._contents[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._contents)

    def __len__(self) -> int:
        return len(self._contents)


def _load_weights(folder: JobFolder, end: End) -> Any:
    if end.unsaved_weights:
        raise ResultError(end.unsaved_weights)
    return _load(folder, WEIGHTS) if end.has_weights else {}


def _load(folder: JobFolder, name: str) -> Any:
    """Return the contents of a file, with tensors mapped from it.

    Raises:
        ResultError: the folder or the file was removed, or the file is damaged, or this process lacks a class.
    """
    try:
        value = folder.load_payload(name)
    except FileNotFoundError:
        raise ResultError(
            f"the result and the weights of the job are gone, because its folder {folder.path} was removed. The "
            f"last {env.read('NBLAUNCH_KEEP_JOBS')} jobs are kept (NBLAUNCH_KEEP_JOBS)"
        ) from None
    except payload.Damaged as error:
        raise ResultError(f"{folder.path / name} is damaged, and was not read: {error}") from None
    except Exception as error:  # from the user's classes
        what = "return value" if name == RESULT else name
        raise ResultError(
            f"the {what} of {folder.id} can't be rebuilt in this process: {type(error).__name__}: {error}. If a cell "
            "defines the class, run that cell and try again"
        ) from error
    if value is None:
        raise ResultError(f"{folder.path / name} was removed, so the {name} of {folder.id} is lost")
    return value
