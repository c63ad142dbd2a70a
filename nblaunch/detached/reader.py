"""JobReader: reads events, output and snapshots of a detached job from its folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from nblaunch.detached.folder import EVENTS, JobFolder, Snapshot, Unusable
from nblaunch.events import AttemptStarted, Event, Exited, Note
from nblaunch.launcher.logtail import LogTail
from nblaunch.wire.board import SlotReading
from nblaunch.wire.channel import EventReceiver

_NO_LIMIT = 1 << 62


class JobReader:
    """Reads the folder of a job from the beginning.

    Args:
        folder: folder of the job.
        ranks: ranks of the job.
        emit: receives events, including events made from other files.
        emit_readings: receives readings of the board.
        events_limit: number of bytes to read from the events file.
        log_limits: rank -> number of bytes that :meth:`catch_up` reads from its last log.

    Raises:
        Unusable: the events can't be read.
    """

    def __init__(
        self,
        folder: JobFolder,
        ranks: Sequence[int],
        emit: Callable[[Event], None],
        emit_readings: Callable[[Sequence[SlotReading]], None],
        events_limit: int = _NO_LIMIT,
        log_limits: Mapping[int, int] | None = None,
    ) -> None:
        self._folder = folder
        self._ranks = ranks
        self._emit = emit
        self._emit_readings = emit_readings
        self._events_limit = events_limit
        self._log_limits = log_limits
        self._tails: dict[int, LogTail] = {}
        self._snapshot: Snapshot | None = None
        self._snapshot_mark: Any = None
        self.has_ended_ranks = False
        key = folder.key(EVENTS)
        try:
            fd = folder.opener(str(folder.path / EVENTS), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise folder.damaged(EVENTS, str(error.strerror or error)) from None
        self._receiver = EventReceiver(fd, f"job {folder.id}", key)

    def read_events(self) -> list[Event]:
        """Return the unread events."""
        events, _ = self._receiver.receive(self._events_limit)
        return events

    def handle(self, event: Event) -> None:
        """Send an event, after the output that precedes it."""
        if isinstance(event, AttemptStarted):
            self.read_logs_to_end()
            self.has_ended_ranks = False
            self._tails = {
                rank: LogTail(rank, self._folder.log_path(rank, event.attempt), opener=self._folder.opener)
                for rank in self._ranks
            }
        elif isinstance(event, Exited):
            self.has_ended_ranks = True
            if self._log_limits is None:
                self.read_logs()  # later events are about the end
        self._emit(event)

    def read_logs(self) -> None:
        """Send what the ranks have printed since the last call."""
        for tail in self._tails.values():
            for event in tail.read():
                self._emit(event)

    def read_logs_to_end(self) -> None:
        """Send the remaining output of the ranks."""
        for tail in self._tails.values():
            for event in tail.read_rest():
                self._emit(event)
                self.tick()
            tail.close()
        self._tails = {}

    def tick(self) -> None:
        """Send the last state of the ranks again, so that listeners publish their pending lines."""
        self._emit_readings(() if self._snapshot is None else self._snapshot.readings)

    def read_snapshot(self) -> None:
        """Send the current state of the ranks if it has changed."""
        mark = self._folder.modified("snapshot")
        if mark is None or mark == self._snapshot_mark:
            return
        self._snapshot_mark = mark
        snapshot = self._load_snapshot()
        if snapshot is None:
            return
        samples = self._snapshot.samples if self._snapshot is not None else ()
        self._snapshot = snapshot
        for event in snapshot.samples:
            if event not in samples:
                self._emit(event)
        self._emit_readings(snapshot.readings)

    def last_snapshot_s(self) -> float | None:
        """Return when the state of the ranks was last written; None = never."""
        mark = self._folder.modified("snapshot")
        return None if mark is None else mark[1] / 1e9

    def has_all_files(self) -> bool:
        """Return whether the open events file is still the one in the folder."""
        return os.fstat(self._receiver.fd).st_nlink > 0 and self._folder.modified(EVENTS) is not None

    def follow_restored(self) -> None:
        """Continue reading from the job process's replacements for removed files; they begin with the same bytes."""
        with suppress(OSError):
            position = os.lseek(self._receiver.fd, 0, os.SEEK_CUR)
            fd = self._folder.opener(str(self._folder.path / EVENTS), os.O_RDONLY | os.O_CLOEXEC)
            os.lseek(fd, position, os.SEEK_SET)
            os.dup2(fd, self._receiver.fd, inheritable=False)
            os.close(fd)
        for tail in self._tails.values():
            tail.follow_restored()

    @contextmanager
    def replay(
        self, emit: Callable[[Event], None], emit_readings: Callable[[Sequence[SlotReading]], None]
    ) -> Iterator[JobReader]:
        """Yield a reader that emits only what this reader has already read."""
        position = os.lseek(self._receiver.fd, 0, os.SEEK_CUR)
        limits = {rank: tail.position for rank, tail in self._tails.items()}
        reader = JobReader(self._folder, self._ranks, emit, emit_readings, position, limits)
        try:
            reader._snapshot = self._snapshot
            yield reader
        finally:
            reader.close()

    def catch_up(self) -> None:
        """Send the output up to the limits, and the last state of the ranks."""
        for rank, tail in self._tails.items():
            limit = (self._log_limits or {}).get(rank, 0)
            while (missing := limit - tail.position) > 0:
                before = tail.position
                for event in tail.read(missing):
                    self._emit(event)
                self.tick()
                if tail.position == before:
                    break  # the file was truncated in the meantime
        for event in self._snapshot.samples if self._snapshot is not None else ():
            self._emit(event)
        self.tick()

    def close(self) -> None:
        """Close the files."""
        for tail in self._tails.values():
            tail.close()
        self._tails = {}
        self._receiver.close()

    def _load_snapshot(self) -> Snapshot | None:
        try:
            return self._folder.load(Snapshot)
        except Unusable as error:
            self._emit(Note.of_job(f"the state of the ranks is not shown: {error.reason}", "warning"))
            return None
