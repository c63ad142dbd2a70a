"""Recorder: the listener of a detached job, which writes all that happens into the job's folder."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nblaunch.detached.folder import End, JobFolder, Snapshot
from nblaunch.diagnosis.exceptions import RemoteRendering
from nblaunch.events import DeviceUse, Event, HostMemory, JobEnded, LogLines, Note, StatusLine
from nblaunch.host import descriptors, disk
from nblaunch.launcher.outcome import JobOutcome
from nblaunch.wire.board import SlotReading
from nblaunch.wire.channel import EventSender
from nblaunch.wire.payload import PayloadWriter
from nblaunch.worker.failure import describe_failure

_PROGRESS_S = 0.25
"""Between two writes of the present state."""

_IN_LOGS = (LogLines, StatusLine)
"""Events that are made of the log files again, where a process attaches."""

_SAMPLES = (DeviceUse, HostMemory)
"""Events of which only the last counts."""


class Recorder:
    """Writes the events, snapshots of the ranks and the outcome of a job. What the disk has no room for is left out.

    Args:
        folder: of the job.
        outcome: returns how the job ended, once it has.
    """

    def __init__(self, folder: JobFolder, outcome: Callable[[], JobOutcome | None]) -> None:
        self._folder = folder
        self._outcome = outcome
        fd = os.open(
            folder.events_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        descriptors.keep_from_children(fd)
        self._sender = EventSender(fd)
        self._samples: dict[tuple[type, int], Event] = {}
        self._readings: Sequence[SlotReading] = ()
        self._next_s = 0.0

    def on_event(self, event: Event) -> None:
        """Append an event; the last one of the job behind everything else that is kept."""
        if isinstance(event, _SAMPLES):
            self._samples[type(event), event.rank] = event
        elif isinstance(event, JobEnded):
            self._write_snapshot()
            if unsaved := self._save_end():
                self._append(Note.of_job(unsaved, "warning"))
            self._append(event)
        elif not isinstance(event, _IN_LOGS):
            self._append(event)

    def on_readings(self, readings: Sequence[SlotReading]) -> None:
        """Write the state of all ranks, a few times a second."""
        self._readings = readings
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _PROGRESS_S
            self._write_snapshot()

    def close(self) -> None:
        """Do nothing: the end is written with its event."""

    def _append(self, event: Event) -> None:
        end = os.fstat(self._sender.fd).st_size
        try:
            self._sender.send(event)
        except OSError:  # the disk is full: without this event, those that follow can be read
            os.ftruncate(self._sender.fd, end)

    def _write_snapshot(self) -> None:
        try:
            self._folder.write(Snapshot(time.time(), self._readings, list(self._samples.values())))
        except OSError:  # the disk is full: the next one may find room
            self._next_s = time.monotonic() + 10 * _PROGRESS_S

    def _save_end(self) -> str:
        """Write the outcome; return why a part of it could not be, empty if all is there."""
        outcome = self._outcome()
        assert outcome is not None, "the job has ended"
        unsaved = _tried(self._folder, lambda: _save_values(self._folder, outcome))
        problem = _tried(self._folder, lambda: self._folder.write(_end_of(outcome, unsaved)))
        return unsaved or problem


def _tried(folder: JobFolder, write: Callable[[], None]) -> str:
    try:
        write()
    except OSError as error:
        return f"the result and the trained weights could not be written: {disk.reason(folder.path, error)}"
    except Exception as error:  # the user's classes have code of their own
        return f"the result could not be written: {type(error).__name__}: {error}"
    return ""


def _end_of(outcome: JobOutcome, unsaved: str) -> End:
    error = outcome.error
    shown = getattr(error, "_render_traceback_", None)
    failed = (
        None
        if error is None
        else describe_failure(-1 if outcome.failed_rank is None else outcome.failed_rank, error)
    )
    return End(
        status=outcome.status,
        time_s=time.time(),
        failed_rank=outcome.failed_rank,
        headline=outcome.headline,
        is_early=outcome.is_early,
        failed=failed,
        shown=shown.info if isinstance(shown, RemoteRendering) else None,
        notes=shown.notes if isinstance(shown, RemoteRendering) else (),
        unsaved=unsaved,
    )


def _save_values(folder: JobFolder, outcome: JobOutcome) -> None:
    """Write what the ranks returned, and trained weights."""
    if outcome.unloaded_weights:
        _write(folder, folder.weights_path, dict(outcome.unloaded_weights))
    if outcome.status == "done":
        _write(folder, folder.result_path, dict(outcome.values))


def _write(folder: JobFolder, path: Path, value: Any) -> None:
    folder.replace(path, lambda file: PayloadWriter(file.fileno()).append(value, main_by_reference=True))
