"""Workers forked from a clean interpreter, for kernels that can't be forked.

There is still only one copy of the model in memory.

kernel ── call by cloudpickle ──> server (fresh interpreter, loads it once)
   ^                                 ├── fork ──> worker 0
   └── started / ended of each rank ─┴── fork ──> worker 1

If the device, or a library that does not survive a fork, was used while the call was being loaded, the server starts
fresh workers instead.
"""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from typing import NoReturn

from nblaunch import backends, env
from nblaunch.errors import LaunchError
from nblaunch.events import ExceptionInfo, ExitStatus, Failed, Note
from nblaunch.host import descendants, descriptors, heap
from nblaunch.start_methods.fork import fork_workers
from nblaunch.start_methods.saved_call import SavedCall, saved_or_now
from nblaunch.start_methods.spawn import Boot, read_boot, report_left, spawn_workers, start_interpreter
from nblaunch.start_methods.worker_group import (
    Children,
    WorkerGroup,
    disown,
    kill_and_reap,
    open_pidfd,
    reap_with_group,
    signal_group,
)
from nblaunch.wire import exceptions
from nblaunch.wire.assignment import Assignment, FunctionCall
from nblaunch.wire.board import Board
from nblaunch.wire.channel import EventSender
from nblaunch.worker import output, process_control
from nblaunch.worker.failure import describe_failure
from nblaunch.worker.inheritance import threads

_REPORT = struct.Struct("<iii")
"""A report from the server to the kernel: kind, rank, and a process id or an exit code."""

_STARTED, _ENDED = 0, 1


def start(
    call: FunctionCall, assignments: Sequence[Assignment], board: Board, saved: SavedCall | None
) -> WorkerGroup:
    """Start one fresh process that loads the call and forks the workers."""
    with saved_or_now(saved, call) as file:
        reading, writing = os.pipe()
        try:
            server = disown(start_interpreter(__name__, assignments, file, writing))
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
    return ForkserverGroup(server, reading, [assignment.rank for assignment in assignments])


class ForkserverGroup(WorkerGroup):
    """Workers that are grandchildren of this process. The server waits for them and reports when they start and end."""

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
            # Workers die with their server, which can't report how each one ended.
            status = ExitStatus(self._server_status.code, self._server)
            ended += [(rank, status) for rank in sorted(self._alive)]
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
            kill_and_reap([self._server])  # a worker that it was starting ends with it
        descriptors.close(self._report_fd)
        if self._server_fd is not None:
            descriptors.close(self._server_fd)

    def _read_reports(self) -> list[tuple[int, ExitStatus]]:
        ended: list[tuple[int, ExitStatus]] = []
        while True:
            try:
                # Never partial: a report is far smaller than PIPE_BUF.
                report = os.read(self._report_fd, _REPORT.size)
            except BlockingIOError:
                return ended
            if not report:
                return ended
            kind, rank, number = _REPORT.unpack(report)
            if kind == _STARTED:
                self._pids[rank] = number
            elif rank in self._alive:
                self._alive.discard(rank)
                ended.append((rank, ExitStatus(number)))


# --- the server ---------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> NoReturn:
    """Load the call, fork the workers, and report when each one starts and ends, until the last one has ended."""
    boot = read_boot(arguments)
    first = boot.assignments[0]
    process_control.lead_posix_session()
    process_control.end_with_parent(first.parent_pid)
    descendants.carry(first.descendant_tag)
    try:
        # Output and errors that appear while the call is being loaded are shown as the first rank's.
        output.capture(first.log_path, keeps_input=first.reads_input)
        process_control.watch_faults(first.stacks_path)
        env.apply({"OMP_NUM_THREADS": str(first.num_threads)})
        process_control.unblock_signals()
        boot.call.restore_surroundings()
        call, _ = boot.call.load()
        report_left(boot)
        with process_control.signals_blocked():
            pids = _start_workers(boot, call)
            # The launcher sends interrupts to the server until it has the workers' pids.
            signal.signal(signal.SIGINT, lambda number, frame: _interrupt(pids))
    except BaseException as error:
        # No worker can report the error yet, so the server reports it for the first rank.
        EventSender(first.event_fd).send(_as_failure(first.rank, error))
        output.flush()
        if isinstance(error, KeyboardInterrupt):
            # End like an interrupted rank; all ranks end with the server.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(1)
    _report_until_all_ended(boot, pids)
    os._exit(0)


def _start_workers(boot: Boot, call: FunctionCall) -> dict[int, int]:
    """Fork the workers; return rank -> process id.

    While the call is being loaded, the device may be used, or a library may start threads: a module that the call needs
    may do so on import. If forked copies of this process would then fail, the workers are fresh interpreters, and each
    of them loads the call.
    """
    first = boot.assignments[0]
    backend = backends.find(first.backend, first.registered_backend)
    try:
        with heap.growing():
            backend.preload()
    except RuntimeError as error:
        raise LaunchError(f"workers for {backend.name} can't be started: {error}") from error
    device_hazard = backend.fork_hazard()
    hazard = device_hazard or threads.find_hazard(call)
    if hazard is None:
        os.close(boot.call.fd)
        board = Board(first.topology.world_size, first.board_fd)
        return fork_workers(call, boot.assignments, board)
    text = (
        "every worker loads the function on its own, so the workers do not share the model: after a fresh "
        f"process had loaded the function, {hazard}. To share the model, import the code that uses the "
        f"{'library' if device_hazard is None else 'device'} inside the function"
    )
    EventSender(first.event_fd).send(Note.of_job(text))
    pids = spawn_workers(boot.assignments, boot.call)
    os.close(boot.call.fd)
    return pids


def _interrupt(pids: Mapping[int, int]) -> None:
    for pid in pids.values():
        signal_group(pid, signal.SIGINT)


def _as_failure(rank: int, error: BaseException) -> Failed:
    if isinstance(error, LaunchError):
        info = ExceptionInfo("LaunchError", str(error))
        return Failed(rank=rank, info=info, exception=exceptions.dump(error))
    return describe_failure(rank, error)


def _report_until_all_ended(boot: Boot, pids: Mapping[int, int]) -> None:
    for assignment in boot.assignments:
        for fd in assignment.own_fds:
            os.close(fd)
    for rank, pid in pids.items():
        os.write(boot.report_fd, _REPORT.pack(_STARTED, rank, pid))
    children = Children(pids)
    num_alive = len(pids)
    while num_alive:
        fds = children.waitables()
        wait(fds, None if fds else 0.1)
        for rank, status in children.poll():
            num_alive -= 1
            os.write(boot.report_fd, _REPORT.pack(_ENDED, rank, status.code))
