"""What a fresh interpreter does: :func:`main`, called with the numbers of two inherited memory files.

    kernel ── boot file: assignments, random states                    (plain, needs no user code)
           ── call file: the function and its arguments, by cloudpickle (may import the user's modules)

As a *zygote* (forkserver) it loads the call once and forks all workers from itself, so that they share one model, and
tells the kernel of each one's start and end. As a *worker* (spawn) it is itself the one rank of its assignment.
"""

from __future__ import annotations

import os
import pickle
import random
import select
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from nblaunch import env
from nblaunch.engines.base import Call
from nblaunch.engines.children import Children
from nblaunch.engines.fork import fork_workers
from nblaunch.errors import LaunchError
from nblaunch.events import ExceptionInfo, Failed
from nblaunch.wire import exceptions, payload
from nblaunch.wire.assignment import Assignment
from nblaunch.wire.board import Board
from nblaunch.wire.channel import EventSender
from nblaunch.worker import bootstrap, guard, shell, stdio
from nblaunch.worker.failure import describe_failure

REPORT = struct.Struct("<iii")
"""What a zygote tells the kernel: kind, rank, and a process id or an exit code."""

STARTED, ENDED = 0, 1


@dataclass(frozen=True)
class Boot:
    """What a fresh interpreter needs to know before it can load the call.

    Args:
        assignments: one for a worker, all for a zygote.
        report_fd: a zygote's pipe to the kernel; -1 for a worker.
        has_shell: the kernel is an IPython shell, so ``display`` shall work here too.
        random_states: the kernel's, so that a fresh worker draws the numbers that a forked one would. Pickled: numpy
            must not be imported before the number of threads is set.
        log_path: where a zygote's own output goes.
    """

    assignments: tuple[Assignment, ...]
    report_fd: int
    has_shell: bool
    log_path: str
    random_states: bytes


def capture_random_states() -> dict[str, Any]:
    """The states of the generators that this process has loaded."""
    states: dict[str, Any] = {"random": random.getstate()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        states["numpy"] = numpy.random.get_state()
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        states["torch"] = torch.get_rng_state().numpy().tobytes()
    return states


def restore_random_states(states: Mapping[str, Any]) -> None:
    random.setstate(states["random"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])
    if "torch" in states:
        import torch

        torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))


def main(arguments: Sequence[str]) -> NoReturn:
    boot_fd, call_fd = (int(argument) for argument in arguments)
    with os.fdopen(boot_fd, "rb") as file:
        boot: Boot = pickle.load(file)
    if boot.report_fd < 0:
        _ensure_shell(boot)  # first: it is connected to the launcher before the call is loaded
        bootstrap.run(boot.assignments[0], lambda: _load_call(boot, call_fd))
    _be_zygote(boot, call_fd)


def _ensure_shell(boot: Boot) -> None:
    if boot.has_shell:
        shell.ensure_shell()


def _load_call(boot: Boot, call_fd: int) -> Call:
    call: Call = payload.load(call_fd)
    os.close(call_fd)
    restore_random_states(pickle.loads(boot.random_states))
    return call


def _be_zygote(boot: Boot, call_fd: int) -> NoReturn:
    first = boot.assignments[0]
    guard.enter_own_session()
    guard.die_with(first.parent_pid)
    stdio.capture(boot.log_path)
    env.apply({"OMP_NUM_THREADS": str(first.num_threads)})
    try:
        guard.let_signals_in()
        _ensure_shell(boot)
        call = _load_call(boot, call_fd)
        board = Board(first.topology.world_size, first.board_fd)
        pids = fork_workers(lambda: call, boot.assignments, board)
    except BaseException as error:
        # Nobody runs yet who could tell: the zygote speaks for rank 0.
        EventSender(first.event_fd).send(_as_failure(error))
        stdio.flush()
        os._exit(1)
    _report_until_all_ended(boot, pids)
    os._exit(0)


def _as_failure(error: BaseException) -> Failed:
    if isinstance(error, LaunchError):
        info = ExceptionInfo("LaunchError", str(error))
        return Failed(rank=0, time_s=time.time(), info=info, exception=exceptions.dump(error))
    return describe_failure(0, error)


def _report_until_all_ended(boot: Boot, pids: Mapping[int, int]) -> None:
    for assignment in boot.assignments:
        for fd in assignment.own_fds:
            os.close(fd)
    for rank, pid in pids.items():
        os.write(boot.report_fd, REPORT.pack(STARTED, rank, pid))
    children = Children(pids)
    num_alive = len(pids)
    while num_alive:
        select.select(children.waitables(), [], [], 0.1 if not children.waitables() else None)
        for rank, status in children.poll():
            num_alive -= 1
            os.write(boot.report_fd, REPORT.pack(ENDED, rank, status.code))
