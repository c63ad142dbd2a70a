"""Recorder: a listener in the job process that writes everything about a job into its folder.

If the disk is full, the recorder keeps data in memory and writes it as soon as there is space: events while the job
runs; the result, the weights and the error when the job ends. The process waits for space until the user drops the
result. At the start, the recorder reserves space for the record of the job's end. Files that are removed while the job
runs are restored.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nblaunch import formatting
from nblaunch.detached.folder import (
    END_RESERVE,
    ERROR,
    EVENTS,
    KEY_NAME,
    MAX_END_BYTES,
    RECORD,
    RESULT,
    WEIGHTS,
    JobError,
    JobFolder,
    Launch,
    Snapshot,
)
from nblaunch.detached.record import FORMAT, End, Record
from nblaunch.diagnosis.exceptions import RemoteRendering
from nblaunch.errors import ResultError
from nblaunch.events import DeviceUse, Event, HostMemory, JobEnded, LogLines, Note, Started, StatusLine
from nblaunch.host import descriptors, files
from nblaunch.launcher.joblog import JobLog
from nblaunch.launcher.outcome import JobOutcome
from nblaunch.launcher.requests import JobRequests
from nblaunch.wire.board import SlotReading
from nblaunch.wire.channel import EventSender
from nblaunch.wire.exceptions import shortened
from nblaunch.wire.pickling import payload
from nblaunch.worker.failure import describe_failure

_PROGRESS_S = 0.25
"""Seconds between writes of the current state."""

_CHECK_S = 1.0
"""Seconds between checks that all files exist."""

_LOOK_S = 0.1
_RETRY_S = 1.0
"""Seconds between checks for a request, and between attempts to write to a full disk."""

_COPY_BYTES = 1 << 20
_MAX_MESSAGE = 4096
_MAX_PENDING = 100_000
"""Maximum length of a message in the record of the job's end, and maximum number of events that wait for space."""

_IN_LOGS = (LogLines, StatusLine)
"""Events that an attaching process reconstructs from the log files."""

_SAMPLES = (DeviceUse, HostMemory)
"""Event classes for which only the last event matters."""


class Recorder:
    """Writes the record, events, snapshots and outcome of a job.

    Args:
        folder: folder of the job.
        log: the job's log folder, which is the same folder.
        record: description of the launch.
        launch: remaining facts about the launch.
        outcome: returns the outcome once the job has ended.
        requests: requests to the job; a request to end it drops data that does not fit on the disk.

    Attributes:
        waits_for: why the process is waiting before it ends; empty if it is not waiting.

    Raises:
        OSError: the files can't be created.
    """

    def __init__(
        self,
        folder: JobFolder,
        log: JobLog,
        record: Record,
        launch: Launch,
        outcome: Callable[[], JobOutcome | None],
        requests: JobRequests,
    ) -> None:
        self.waits_for = ""
        self._folder = folder
        self._log = log
        self._record = record
        self._launch = launch
        self._outcome = outcome
        self._requests = requests
        self._samples: dict[tuple[type, int], Event] = {}
        self._readings: Sequence[SlotReading] = ()
        self._pending: deque[Event] = deque()
        self._num_dropped = 0
        self._endings_before: int | None = None  # requests before the wait for space began
        self._next_write_s = self._next_check_s = 0.0
        self._has_workers = False
        self._lock = threading.RLock()  # shared with the thread that serves requests and restores the folder
        self._home_fd = -1
        self._keep_home_from_cleaners()
        with folder.opened() as folder_fd:
            self._events_fd = _make_events(folder_fd)
            files.reserve(folder_fd, END_RESERVE, MAX_END_BYTES)
        self._sender = EventSender(self._events_fd, folder.key(EVENTS))

    def publish(self) -> None:
        """Write what was launched. Other processes can then attach.

        Raises:
            OSError: the files can't be written.
        """
        with self._lock:  # the thread that serves requests may restore these files at the same time
            self._folder.write(self._launch)
            self._folder.write_plain(self._record)

    def on_event(self, event: Event) -> None:
        """Append an event. The last event is written after all other data."""
        if isinstance(event, _SAMPLES):
            self._samples[type(event), event.rank] = event
        elif isinstance(event, JobEnded):
            self._write_snapshot()
            self._save_end(event)
        elif not isinstance(event, _IN_LOGS):
            self._append(event)
            if isinstance(event, Started) and not self._has_workers:
                self._has_workers = True
                self._write_snapshot()  # this file says that workers are running; readings follow a moment later

    def on_readings(self, readings: Sequence[SlotReading]) -> None:
        """Write the state of all ranks a few times per second, and restore removed files."""
        self._readings = readings
        now_s = time.monotonic()
        if now_s >= self._next_write_s:
            self._next_write_s = now_s + _PROGRESS_S
            self._write_snapshot()
            self._append()
        if now_s >= self._next_check_s:
            self._next_check_s = now_s + _CHECK_S
            self.restore()

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            for fd in (self._events_fd, self._home_fd):
                if fd >= 0:
                    descriptors.close(fd)
            self._events_fd = self._home_fd = -1

    # --- the folder ----------------------------------------------------------------------------------------------

    def restore(self) -> str:
        """Restore files removed from the folder; return why that failed, or an empty string."""
        with self._lock:
            try:
                if self._events_fd >= 0 and not self._is_whole():
                    self._restore()
            except (OSError, ValueError) as error:
                return files.reason_of(self._folder.path, error) if isinstance(error, OSError) else str(error)
        return ""

    def _is_whole(self) -> bool:
        try:
            with self._folder.opened() as fd:
                has_others = all(_exists(fd, name) for name in (RECORD, "launch", END_RESERVE))
                return has_others and _is_same(fd, EVENTS, self._events_fd)
        except FileNotFoundError:  # the folder was removed
            return False

    def _restore(self) -> None:
        key = self._folder.key(EVENTS)  # the user's key, read at the beginning
        files.make_private_folder(self._folder.path)
        self._keep_home_from_cleaners()
        with files.private_folder(self._folder.path.parent) as home_fd:
            files.make_once(home_fd, KEY_NAME, self._folder.user_key)
        with self._folder.opened() as fd:
            self._log.mark()
            if not _is_same(fd, EVENTS, self._events_fd):
                _remove(fd, EVENTS)
                self._move_events(_make_events(fd), key)
            if not _exists(fd, END_RESERVE):
                files.reserve(fd, END_RESERVE, MAX_END_BYTES)
        if self._has_workers:
            self._write_snapshot()
        self.publish()

    def _move_events(self, new_fd: int, key: bytes) -> None:
        try:
            _copy(self._events_fd, new_fd)
        except BaseException:  # tried again at the next check
            descriptors.close(new_fd)
            raise
        descriptors.close(self._events_fd)
        self._events_fd, self._sender = new_fd, EventSender(new_fd, key)

    def _keep_home_from_cleaners(self) -> None:
        if self._home_fd >= 0:
            descriptors.close(self._home_fd)
            self._home_fd = -1
        self._home_fd = files.open_private(self._folder.path.parent)
        descriptors.keep_from_children(self._home_fd)
        files.keep_from_cleaners(self._home_fd)

    # --- while it runs -------------------------------------------------------------------------------------------

    def _append(self, *events: Event) -> OSError | None:
        """Append events, after earlier ones that did not fit; return why there is no space, or None if all were
        written.
        """
        with self._lock:
            self._pending.extend(events)
            while len(self._pending) > _MAX_PENDING:
                self._pending.popleft()
                self._num_dropped += 1
            while self._pending:
                end = os.fstat(self._events_fd).st_size
                try:
                    self._sender.send(self._pending[0])
                except OSError as error:  # remove a partial event, so that later events can be read
                    os.ftruncate(self._events_fd, end)
                    return error
                self._pending.popleft()
        return None

    def _write_snapshot(self) -> None:
        try:
            with self._lock:
                self._folder.write(Snapshot(time.time(), self._readings, list(self._samples.values())))
        except (OSError, ValueError):  # the disk is full; the next write may fit
            self._next_write_s = time.monotonic() + 10 * _PROGRESS_S

    # --- the end -------------------------------------------------------------------------------------------------

    def _save_end(self, event: JobEnded) -> None:
        outcome = self._outcome()
        assert outcome is not None, "the job has ended"
        folder, values, weights = self._folder, dict(outcome.values), dict(outcome.unloaded_weights)
        # Write the result first and separately, so that it is kept even if the weights, which may be large, can't be
        # written.
        parts: dict[str, _Part] = {}
        if outcome.status == "done" or values:
            parts[RESULT] = _Part("the result", lambda: folder.write_payload(RESULT, values), values)
        if weights:
            parts[WEIGHTS] = _Part(
                "the trained weights", lambda: folder.write_payload(WEIGHTS, weights), weights
            )
        if outcome.error is not None:
            error = _error_of(outcome)
            parts[ERROR] = _Part("the error", lambda: folder.write(error))
        unsaved = self._save_parts(parts)
        unsaved_events = self._save(_Part("the logged values", self._append_pending))
        lost = "; ".join(filter(None, (*unsaved.values(), unsaved_events)))
        end = End(
            format=FORMAT,
            event=replace(event, message=shortened(event.message, _MAX_MESSAGE)),
            unsaved=shortened(unsaved.get(RESULT, ""), _MAX_MESSAGE),
            has_weights=bool(weights),
            unsaved_weights=shortened(unsaved.get(WEIGHTS, ""), _MAX_MESSAGE),
            unsaved_error=shortened(unsaved.get(ERROR, ""), _MAX_MESSAGE),
            partial_rank=_partial_rank(outcome),
        )
        self._save(_Part("the end of the job", lambda: folder.write_plain(end)))
        if self._num_dropped:
            text = f"{self._num_dropped:,} events were lost because the disk was full"
            lost = "; ".join(filter(None, (lost, text)))
        self._append(*([Note.of_job(lost, "warning")] if lost else []), event)

    def _append_pending(self) -> None:
        problem = self._append()
        if problem is not None:
            raise problem

    def _save_parts(self, parts: Mapping[str, _Part]) -> dict[str, str]:
        """Write the outcome files; return the reason for each one that could not be written, by name.

        Writing a file can take a long time on a full disk. If an earlier file is removed in the meantime, write it
        again.
        """
        unsaved: dict[str, str] = {}
        while missing := [name for name in parts if name not in unsaved and not self._is_there(name)]:
            for name in missing:
                if problem := self._save(parts[name]):
                    unsaved[name] = problem
        return unsaved

    def _is_there(self, name: str) -> bool:
        try:
            return self._folder.modified(name) is not None
        except OSError:  # the folder is gone too, or others can change it; the next write reports this
            return False

    def _save(self, part: _Part) -> str:
        """Write a part of the outcome as soon as there is space; return why that was impossible, or an empty string."""
        try:
            while True:
                try:
                    part.write()
                except OSError as error:
                    problem = error
                else:
                    return ""
                why = files.reason_of(self._folder.path, problem)
                if not self._waits(part, problem, why):
                    return f"{part.what} could not be written: {why}. It was dropped on request"
        except Exception as error:  # raised by the user's classes
            return f"{part.what} could not be written: {type(error).__name__}: {error}"
        finally:
            self.waits_for = ""

    def _waits(self, part: _Part, problem: OSError, why: str) -> bool:
        """Wait until another attempt may succeed; return False if the user asked to give up.

        Data is dropped only by a request that arrives after this process has begun to wait. An earlier request was
        meant to end training, because the user could not have known that the disk was full.
        """
        if self._endings_before is None:
            self._endings_before = self._requests.endings
        num_bytes = payload.num_bytes(part.value)  # raises if the value's own code fails
        place = self._folder.path.parent
        needs = f"{formatting.size(num_bytes)} of space" if num_bytes > _COPY_BYTES else "room"
        self.waits_for = (
            f"waits for {needs} in {place} to write {part.what} ({why}). It keeps trying until there is space; "
            f"job.stop() or `nblaunch stop {self._folder.id}` drops the result"
        )
        next_try_s = time.monotonic() + _RETRY_S
        while self._requests.endings <= self._endings_before:
            self.restore()
            free = files.free_bytes(place) if problem.errno == errno.ENOSPC else None
            # An attempt without enough space would briefly take the remaining space from other processes.
            if time.monotonic() >= next_try_s and (free is None or free > num_bytes):
                return True
            time.sleep(_LOOK_S)
        return False


@dataclass(frozen=True)
class _Part:
    """A part of the outcome.

    Args:
        what: name that messages use.
        write: writes the value into the folder.
        value: the value to pickle. Messages state its size. None if it is tiny.
    """

    what: str
    write: Callable[[], None]
    value: Any = None


def _make_events(folder_fd: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
    fd = os.open(EVENTS, flags, 0o600, dir_fd=folder_fd)
    descriptors.keep_from_children(fd)
    return fd


def _copy(from_fd: int, to_fd: int) -> None:
    at = 0
    while chunk := os.pread(from_fd, _COPY_BYTES, at):
        at += len(chunk)
        while chunk:
            chunk = chunk[os.write(to_fd, chunk) :]


def _exists(folder_fd: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _is_same(folder_fd: int, name: str, fd: int) -> bool:
    return _exists(folder_fd, name) and os.path.samestat(
        os.stat(name, dir_fd=folder_fd, follow_symlinks=False), os.fstat(fd)
    )


def _remove(folder_fd: int, name: str) -> None:
    if _exists(folder_fd, name):
        os.unlink(name, dir_fd=folder_fd)


def _error_of(outcome: JobOutcome) -> JobError:
    assert outcome.error is not None, "the job has failed"
    failed = describe_failure(-1 if outcome.failed_rank is None else outcome.failed_rank, outcome.error)
    notes = None
    shown = getattr(outcome.error, "_render_traceback_", None)
    if isinstance(shown, RemoteRendering):
        failed, notes = replace(failed, info=shown.info), shown.notes
    return JobError(failed, notes)


def _partial_rank(outcome: JobOutcome) -> int | None:
    partial = outcome.error.partial if isinstance(outcome.error, ResultError) else None
    ranks = [rank for rank, value in outcome.values.items() if value is partial]
    return ranks[0] if partial is not None and ranks else None
