"""What a fresh interpreter does: :func:`main`, called with the number of an inherited memory file.

    kernel ── boot file: assignments, what surrounds the call          (plain, needs no user code)
           ── call file: the function and its arguments, by cloudpickle (may import the user's modules)

As a *forkserver* it loads the call once and forks all workers from itself, so that they share one model, and
reports each one's start and end to the kernel; where loading the call has used the device, it starts fresh workers
instead. As a *worker* (spawn), it is itself the one rank of its assignment.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from typing import NoReturn

from nblaunch import backends, env
from nblaunch.errors import LaunchError
from nblaunch.events import ExceptionInfo, Failed, Note
from nblaunch.host import descendants
from nblaunch.start_methods.children import Children, signal_group
from nblaunch.start_methods.fork import fork_workers
from nblaunch.start_methods.interpreter import Boot
from nblaunch.start_methods.saved_call import SavedCall
from nblaunch.start_methods.spawn import spawn_workers
from nblaunch.wire import exceptions
from nblaunch.wire.assignment import FunctionCall
from nblaunch.wire.board import Board
from nblaunch.wire.channel import EventSender
from nblaunch.wire.originals import Originals
from nblaunch.worker import bootstrap, output, process_control
from nblaunch.worker.failure import describe_failure

REPORT = struct.Struct("<iii")
"""What a server reports to the kernel: kind, rank, and a process id or an exit code."""

STARTED, ENDED = 0, 1


def main(arguments: Sequence[str]) -> NoReturn:
    """Run what the launcher wrote to the memory file whose descriptor is given: a worker, or the server of all."""
    with os.fdopen(int(arguments[0]), "rb") as file:
        boot: Boot = pickle.load(file)
    if boot.report_fd < 0:
        _run_worker(boot)
    _run_forkserver(boot)


def _run_worker(boot: Boot) -> NoReturn:
    boot.call.restore_surroundings()  # first: displays are connected to the launcher before the call is loaded
    os.set_inheritable(boot.call.fd, False)
    originals = Originals(boot.call.fd)

    def load() -> FunctionCall:
        call, originals.address = boot.call.load()
        return call

    bootstrap.run(boot.assignments[0], load, originals=originals)


def _run_forkserver(boot: Boot) -> NoReturn:
    first = boot.assignments[0]
    process_control.lead_posix_session()
    process_control.end_with_parent(first.parent_pid)
    descendants.carry(first.descendant_tag)
    try:
        output.capture(boot.log_path)
        env.apply({"OMP_NUM_THREADS": str(first.num_threads)})
        process_control.unblock_signals()
        boot.call.restore_surroundings()
        call, _ = boot.call.load()
        with process_control.signals_blocked():
            pids = _start_workers(boot, call)
            # The launcher interrupts the server until it knows the workers.
            signal.signal(signal.SIGINT, lambda number, frame: _interrupt(pids))
    except BaseException as error:
        # No worker runs yet that could report it: the server does for the first rank.
        EventSender(first.event_fd).send(_as_failure(first.rank, error))
        output.flush()
        if isinstance(error, KeyboardInterrupt):  # it ends all ranks as it would end each of them
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        os._exit(1)
    _report_until_all_ended(boot, pids)
    os._exit(0)


def _start_workers(boot: Boot, call: FunctionCall) -> dict[int, int]:
    """Fork the workers; return rank -> process id.

    Where loading the call has used the device (a module of it does so when it is imported), copies of this process
    can't use it either. Then the workers are fresh interpreters, each of which loads the call by itself.
    """
    first = boot.assignments[0]
    backend = backends.find(first.backend, first.registered_backend)
    try:
        backend.preload()
    except RuntimeError as error:
        raise LaunchError(f"workers for {backend.name} can't be started: {error}") from error
    hazard = backend.fork_hazard()
    if hazard is None:
        os.close(boot.call.fd)
        board = Board(first.topology.world_size, first.board_fd)
        return fork_workers(lambda: call, boot.assignments, board)
    text = (
        f"every worker loads the function by itself, and the model is not shared: when a fresh process had loaded it, "
        f"{hazard}. Importing inside the function what uses the device would share it"
    )
    EventSender(first.event_fd).send(Note.of_job(text))
    pids = spawn_workers(boot.assignments, SavedCall.around(boot.call.fd))
    os.close(boot.call.fd)
    return pids


def _interrupt(pids: Mapping[int, int]) -> None:
    for pid in pids.values():
        signal_group(pid, signal.SIGINT)


def _as_failure(rank: int, error: BaseException) -> Failed:
    if isinstance(error, LaunchError):
        info = ExceptionInfo("LaunchError", str(error))
        return Failed(rank=rank, time_s=time.time(), info=info, exception=exceptions.dump(error))
    return describe_failure(rank, error)


def _report_until_all_ended(boot: Boot, pids: Mapping[int, int]) -> None:
    for assignment in boot.assignments:
        for fd in assignment.own_fds:
            os.close(fd)
    for rank, pid in pids.items():
        os.write(boot.report_fd, REPORT.pack(STARTED, rank, pid))
    children = Children(pids)
    num_alive = len(pids)
    while num_alive:
        fds = children.waitables()
        wait(fds, None if fds else 0.1)
        for rank, status in children.poll():
            num_alive -= 1
            os.write(boot.report_fd, REPORT.pack(ENDED, rank, status.code))
