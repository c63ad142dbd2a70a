"""Copies of the ranks' logs in this process's folder, which are read like the logs of a single machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress

from nblaunch import env, formatting
from nblaunch.engines.messages import LogPart
from nblaunch.events import Event
from nblaunch.launcher.joblog import JobLog
from nblaunch.launcher.logtail import LogTail


class LogCopies:
    """Copies of the logs of one attempt.

    Args:
        log: the logs of the job.
        attempt: number of the attempt.
        ranks: ranks on all nodes.
    """

    def __init__(self, log: JobLog, attempt: int, ranks: Iterable[int]) -> None:
        log.make_attempt_folder(attempt, ())
        max_bytes = env.read("NBLAUNCH_LOG_LIMIT_MB") * 1_000_000
        paths = {rank: log.log_path(rank, attempt) for rank in ranks}
        self._log, self._attempt = log, attempt
        self._paths = {rank: str(path) for rank, path in paths.items()}
        self._tails = {rank: LogTail(rank, path, max_bytes) for rank, path in paths.items()}
        self._unread: set[int] = set()

    def write(self, part: LogPart) -> None:
        """Append a part to the copy of a rank's log or stacks. A full disk does not end a job."""
        data = part.data
        if part.left_out:
            gap = f"... {formatting.size(part.left_out)} of output are only in the file on its node ...\n"
            data = b"\n" + gap.encode() + data
        path = self._paths[part.rank]
        if part.is_stacks:
            path = str(self._log.stacks_path(part.rank, self._attempt))
        else:
            self._unread.add(part.rank)
        with suppress(OSError):
            fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                while data:
                    data = data[os.write(fd, data) :]
            finally:
                os.close(fd)

    def read(self) -> Iterator[tuple[int, Event]]:
        """Yield the events for output written since the last call, each with its rank."""
        for rank in sorted(self._unread):
            tail = self._tails[rank]
            for event in tail.read():
                yield rank, event
            if not tail.is_behind:
                self._unread.discard(rank)

    def read_rest(self) -> Iterator[Event]:
        """Yield the events for the unread rest of each log."""
        for tail in self._tails.values():
            yield from tail.read_rest()

    def close(self) -> None:
        """Close the files."""
        for tail in self._tails.values():
            tail.close()
