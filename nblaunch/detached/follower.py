"""JobFollower: a detached job, followed by the files in its folder: a ``Job`` of this process, with its dashboards."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from nblaunch import backends, env
from nblaunch.detached.folder import End, JobFolder, Record, Snapshot
from nblaunch.detached.requests import RemoteRequests
from nblaunch.diagnosis.exceptions import annotate, rebuild
from nblaunch.errors import JobLost, ResultError
from nblaunch.events import AttemptStarted, Event, Exited, JobEnded
from nblaunch.launcher.job import Job, Listener
from nblaunch.launcher.logtail import LogTail
from nblaunch.launcher.outcome import JobOutcome
from nblaunch.launcher.plan import LaunchPlan
from nblaunch.wire import exceptions, payload
from nblaunch.wire.assignment import restore_sources
from nblaunch.wire.channel import EventReceiver

_POLL_S = 0.1
_FIRST_LOOK_S = 5.0
_POLLS_PER_CHECK = 10
"""Looks at the files for each look at whether the job process runs."""


class JobFollower(Job):
    """A job that another process runs.

    Args:
        listeners: receive its events, all from the first.

    Raises:
        LookupError: it is no job's folder.
    """

    def __init__(self, folder: JobFolder, listeners: Sequence[Listener] = ()) -> None:
        record = folder.load(Record)
        if record is None:
            raise LookupError(f"{folder.path} is not the folder of a detached job")
        restore_sources(record.sources)
        super().__init__(record.spec, _plan_of(record), folder, RemoteRequests(folder.path), listeners)
        self.id = folder.id
        self._folder = folder
        self._process_pid = record.pid
        self._tails: dict[int, LogTail] = {}
        self._receiver = EventReceiver(
            os.open(folder.events_path, os.O_RDONLY | os.O_CLOEXEC), f"job {folder.id}"
        )
        self._snapshot: Snapshot | None = None
        self._has_looked = threading.Event()

    def follow(self) -> None:
        """Follow the job to its end in a thread; return when its state is known, or soon."""
        threading.Thread(target=self._follow, name=f"nblaunch-{self.id}", daemon=True).start()
        self._has_looked.wait(_FIRST_LOOK_S)

    def wait_for_start(self, interrupts: Sequence[float]) -> None:
        """Wait until the workers run, or the job has ended; once it was interrupted, for its end.

        Args:
            interrupts: the time of each interrupt, appended meanwhile; they end the job.
        """
        is_over = False
        while not is_over:
            while self.requests.interrupts < len(interrupts):
                self.requests.interrupt()
            is_over = self.ends_within(_POLL_S) if interrupts else self._launch_settled.wait(_POLL_S)

    # --- the thread ----------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        try:
            self._follow_to_end()
        except BaseException as error:  # of a listener, or of the files
            self._conclude(
                JobOutcome.of_error(error), JobEnded(-1, time.time(), "failed", message=str(error))
            )
        finally:
            self._has_looked.set()
            for tail in self._tails.values():
                tail.close()
            self._receiver.close()

    def _follow_to_end(self) -> None:
        for num_polls in itertools.count():
            has_job_process = num_polls % _POLLS_PER_CHECK > 0 or self._folder.has_job_process
            events, _ = self._receiver.receive()  # after that look: of one that has gone, these are all
            if num_polls == 0:
                events = self._dated(events, has_job_process)
            for event in events:
                if isinstance(event, JobEnded):
                    self._end()
                    return
                self._handle(event)
            self._has_looked.set()
            self._read_logs()
            self._read_snapshot()
            if not has_job_process:
                self._end()
                return
            time.sleep(_POLL_S)

    def _dated(self, events: Sequence[Event], has_job_process: bool) -> list[Event]:
        """Return events of the past with the time since the start of attempts, up to now or to the job's end."""
        snapshot = self._folder.load(Snapshot, is_patient=True)
        now_s = time.time()
        if events and isinstance(events[-1], JobEnded):
            now_s = events[-1].time_s
        elif not has_job_process and snapshot is not None:
            now_s = snapshot.time_s
        return [
            replace(event, ago_s=max(0.0, now_s - event.time_s))
            if isinstance(event, AttemptStarted)
            else event
            for event in events
        ]

    def _handle(self, event: Event) -> None:
        if isinstance(event, AttemptStarted):
            self._read_logs_to_end()
            self.attempt, self.pids = event.attempt, {}
            # The job process has decided how its workers start; all else is as the launching process has planned it.
            self.plan = replace(
                self.plan, start_method=event.start_method, reason=event.reason, fallback=event.fallback
            )
            self._tails = {rank: LogTail(rank, self.log.log_path(rank, event.attempt)) for rank in self.ranks}
        elif isinstance(event, Exited):
            self._read_logs()  # what follows is about the end
        self.emit(event)

    def _read_logs(self) -> None:
        for tail in self._tails.values():
            for event in tail.read():
                self.emit(event)

    def _read_logs_to_end(self) -> None:
        readings = () if self._snapshot is None else self._snapshot.readings
        for tail in self._tails.values():
            for event in tail.read_rest():
                self.emit(event)
                self.emit_readings(readings)  # the tick at which listeners publish, and hold lines no longer
            tail.close()
        self._tails = {}

    def _read_snapshot(self) -> None:
        snapshot = self._folder.load(Snapshot, is_patient=True)
        if snapshot is None or snapshot == self._snapshot:
            return
        known = self._snapshot.samples if self._snapshot is not None else ()
        self._snapshot = snapshot
        for event in snapshot.samples:
            if event not in known:
                self.emit(event)
        self.emit_readings(snapshot.readings)

    # --- the end -------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        """Conclude with what the job process has left."""
        end = self._folder.load(End, is_patient=True)  # first: then there are descriptors for the logs, too
        self._read_logs_to_end()
        self._read_snapshot()
        if end is not None:
            outcome = _outcome_of(self._folder, end)
            ended = end.event
        else:
            text, headline = self._describe_loss()
            outcome = JobOutcome("lost", JobLost(text), headline=headline)
            time_s = self._snapshot.time_s if self._snapshot is not None else time.time()
            ended = JobEnded(-1, time_s, "failed", message=outcome.message)
        self._conclude(outcome, ended)

    def _describe_loss(self) -> tuple[str, str]:
        """Return what is known of a job whose end nothing has recorded, and the same in a few words."""
        pid = self._process_pid
        if not self._folder.path.exists():
            return (
                f"the folder of {self.id}, {self._folder.path}, was removed: nothing can be read or requested of the "
                f"job any more. Its process (pid {pid}) and workers may still run: `kill {pid}` ends them"
            ), "its folder was removed"
        return (
            f"the process of {self.id} (pid {pid}) was killed, or this machine was restarted: "
            f"its workers ended with it, and there is no result. Logs: {self._folder.path}"
        ), "its process was killed"

    def _conclude(self, outcome: JobOutcome, ended: JobEnded) -> None:
        self.status, self.outcome = outcome.status, outcome.with_traceback()
        try:
            self.emit(ended)
            self._close_listeners()
        finally:
            self._ended.set()
            self._launch_settled.set()


def _plan_of(record: Record) -> LaunchPlan:
    backend = backends.find(record.backend, record.registered_backend)
    return LaunchPlan(backend=backend, modules={}, **record.plan)


def _outcome_of(folder: JobFolder, end: End) -> JobOutcome:
    error = _error_of(end)
    if error is None and end.unsaved:
        error = ResultError(end.unsaved)
    if isinstance(error, ResultError) and error.partial is None and end.partial_rank is not None:
        with suppress(ResultError):  # of a class that is not here; the error says so of the whole
            error.partial = _load_values(folder).get(end.partial_rank)
    return JobOutcome(
        status=end.event.outcome,
        error=error,
        failed_rank=end.event.failed_rank,
        headline=end.event.message,
        is_early=end.event.is_early,
        values=_Stored(lambda: _load_values(folder)),
        unloaded_weights=_Stored(lambda: _load_weights(folder, end)),
    )


def _error_of(end: End) -> BaseException | None:
    """Return the error that ended the job, with the frames and notes that the job process has found."""
    if end.failed is None:
        return None
    error = rebuild(end.failed)
    if end.notes is not None:
        exceptions.set_attribute(error, "__notes__", [])
        annotate(error, end.failed.info, end.notes)
    return error


class _Stored(Mapping[Any, Any]):
    """A mapping that is read from the job's folder when it is needed."""

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


def _load_values(folder: JobFolder) -> Any:
    try:
        return _load(folder.result_path)
    except ResultError:
        raise
    except Exception as error:  # of the user's classes, which this process may not have
        raise ResultError(
            f"the return value of {folder.id} can't be rebuilt in this process: {type(error).__name__}: {error}. If "
            "the class is defined in a cell, run that cell and ask again"
        ) from error


def _load_weights(folder: JobFolder, end: End) -> Any:
    if end.unsaved_weights:
        raise ResultError(end.unsaved_weights)
    return _load(folder.weights_path)


def _load(path: Path) -> Any:
    """Return what a file holds, with tensors on its pages; an empty dictionary without the file.

    Raises:
        ResultError: its folder was removed.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise ResultError(
                f"result and weights of the job are gone: its folder {path.parent} was removed. The last "
                f"{env.read('NBLAUNCH_KEEP_JOBS')} jobs are kept (NBLAUNCH_KEEP_JOBS)"
            ) from None
        return {}
    try:
        return payload.load_mapped(fd)
    finally:
        os.close(fd)
