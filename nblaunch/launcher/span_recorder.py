"""Records in a file of the attempt how ranks spend their time; timelines are made from this file.

    rings of the board ── 10 times a second ──> SpanRecorder ── every half second ──> attempt_0/spans
                                                    └──> SlowWatch (slow_watch.py)

When the file is full, it replaces ``spans.before``, so the newest spans are kept. The job does not need the file: if it
can't be written, the job continues without a timeline.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from contextlib import suppress

from nblaunch.events import Event
from nblaunch.launcher.attempt import RunningAttempt
from nblaunch.launcher.joblog import LogFolder
from nblaunch.launcher.slow_watch import SlowWatch
from nblaunch.wire.spans import read_blocks, to_blocks

_MAX_BYTES = 32 << 20
"""Maximum size of a file; two are kept. 8 ranks with 10,000 steps of 4 spans each fill a third of one."""

_WRITE_S = 0.5
_NAMES = ("spans.before", "spans")


class SpanRecorder:
    """Collects the spans of this machine's ranks in an attempt.

    Args:
        running: the attempt.
        watch: judges the spans as they arrive.
    """

    def __init__(self, running: RunningAttempt, watch: SlowWatch) -> None:
        attempt = running.attempt
        self._folder = attempt.log.attempt_path(attempt.number)
        self._board, self._ranks = running.board, attempt.ranks
        self._watch = watch
        self._pending: list[bytes] = []
        self._next_write_s = 0.0
        self._num_bytes = 0
        self._is_writable = True

    def receive(self, event: Event) -> None:
        """Pass an event on to the watch."""
        self._watch.receive(event)

    def collect(self, alive: Collection[int] = ()) -> None:
        """Collect the spans since the last call."""
        spans = {rank: data for rank in self._ranks if (data := self._board.spans(rank).read())}
        if self._is_writable and spans:
            self._pending.append(to_blocks(spans))
        if time.monotonic() >= self._next_write_s:
            self._write()
        if alive:
            self._watch.take(spans)

    def end(self) -> None:
        """Write the last spans."""
        self._write()

    def _write(self) -> None:
        self._next_write_s = time.monotonic() + _WRITE_S
        data, self._pending = b"".join(self._pending), []
        if not data:
            return
        before, path = (self._folder / name for name in _NAMES)
        try:
            if self._num_bytes and self._num_bytes + len(data) > _MAX_BYTES:
                os.replace(path, before)
                self._num_bytes = 0
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            try:
                self._num_bytes += os.write(fd, data)
            finally:
                os.close(fd)
        except OSError:
            self._is_writable = False


def recorded(log: LogFolder) -> Iterator[tuple[int, bytes]]:
    """Yield (rank, spans) for all attempts of a job; each rank's spans are sorted by end time."""
    for attempt in log.attempts():
        for name in _NAMES:
            path = str(log.attempt_path(attempt) / name)
            with suppress(FileNotFoundError), open(path, "rb", opener=log.opener) as file:
                yield from read_blocks(file)
