"""Workers forked from a clean interpreter: for kernels that can't be forked, with one model in memory all the same.

kernel ── call by cloudpickle ──> server (fresh interpreter, loads it once)
   ^                                 ├── fork ──> worker 0
   └── started / ended of each rank ─┴── fork ──> worker 1
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

from nblaunch.events import ExitStatus
from nblaunch.host import descriptors
from nblaunch.start_methods.base import WorkerGroup
from nblaunch.start_methods.children import disown, kill_and_reap, open_pidfd, reap_with_group, signal_group
from nblaunch.start_methods.interpreter import start_interpreter
from nblaunch.start_methods.interpreter_main import REPORT, STARTED
from nblaunch.start_methods.saved_call import SavedCall, saved_or_now
from nblaunch.wire.assignment import Assignment, FunctionCall
from nblaunch.wire.board import Board


def start(
    call: FunctionCall, assignments: Sequence[Assignment], board: Board, saved: SavedCall | None
) -> WorkerGroup:
    """Start one fresh process that loads the call and forks the workers."""
    with saved_or_now(saved, call) as file:
        reading, writing = os.pipe()
        try:
            server = disown(start_interpreter(assignments, file, writing))
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
    return ForkserverGroup(server, reading, [assignment.rank for assignment in assignments])


class ForkserverGroup(WorkerGroup):
    """Workers that are grandchildren: the server waits for them and reports."""

    def __init__(self, server: int, report_fd: int, ranks: Sequence[int]) -> None:
        self._server = server
        self._server_status: ExitStatus | None = None
        self._server_fd = open_pidfd(server)
        self._report_fd = report_fd
        self._pids: dict[int, int] = {}
        self._alive = set(ranks)
        self._abandoned: list[int] = []
        os.set_blocking(report_fd, False)
        descriptors.keep_from_children(report_fd)

    def pids(self) -> dict[int, int]:
        return dict(self._pids)

    def process_groups(self) -> list[int]:
        server = [self._server] if self._server_status is None else []
        return server + [pid for rank, pid in self._pids.items() if rank in self._alive] + self._abandoned

    def waitables(self) -> list[int]:
        fds = [self._report_fd]
        if self._server_fd is not None and self._server_status is None:
            fds.append(self._server_fd)
        return fds

    def poll(self) -> list[tuple[int, ExitStatus]]:
        if self._server_status is None:
            self._server_status = reap_with_group(self._server)
        ended = self._read_reports()
        if self._server_status is not None and self._alive:
            # Without its server no worker lives (they die with it), and how each one ended is not known.
            ended += [(rank, self._server_status) for rank in sorted(self._alive)]
            self._alive.clear()
        return ended

    def signal(self, rank: int, signum: int) -> None:
        if rank not in self._alive:
            return
        if rank in self._pids:
            signal_group(self._pids[rank], signum)
        elif self._server_status is None:
            signal_group(self._server, signum)  # still loading: there are no workers yet

    def abandon(self, rank: int) -> None:
        self._alive.discard(rank)
        if rank in self._pids:
            self._abandoned.append(self._pids[rank])

    def close(self) -> None:
        for rank in self._alive & self._pids.keys():
            self.signal(rank, signal.SIGKILL)
        if self._server_status is None:
            kill_and_reap([self._server])  # a worker that it was just about to start ends with it
        descriptors.close(self._report_fd)
        if self._server_fd is not None:
            descriptors.close(self._server_fd)

    def _read_reports(self) -> list[tuple[int, ExitStatus]]:
        ended: list[tuple[int, ExitStatus]] = []
        while True:
            try:
                report = os.read(self._report_fd, REPORT.size)  # written whole: far below PIPE_BUF
            except BlockingIOError:
                return ended
            if not report:
                return ended
            kind, rank, number = REPORT.unpack(report)
            if kind == STARTED:
                self._pids[rank] = number
            elif rank in self._alive:
                self._alive.discard(rank)
                ended.append((rank, ExitStatus(number)))
