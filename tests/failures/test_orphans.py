"""The kernel ends in any way: none of its processes is left three seconds later."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.failures.conftest import START_METHODS
from tests.kernels import Cell, Kernel
from tests.thorough import thorough

LIMIT_S = 60.0

# Each rank is in a state in which a process is hard to end.

TRAIN = """
import collections, itertools, subprocess

class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        ignore_signals()
        while True:
            yield 1

def ignore_signals():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

def say_ready():
    print("rea" + "dy", rank())
    dist.distributed_c10d._get_default_store().set(f"ready {rank()}", "")

def wait_for_those_that_wait():
    # A rank that computes begins last, and leaves the cores to the others until then.
    dist.distributed_c10d._get_default_store().wait([f"ready {other}" for other in (0, 3, 4, 5, 6, 7)])

def stay():
    try:
        raise ValueError("away")
    finally:
        say_ready()
        while True:
            time.sleep(1)

def train():
    dist.init_process_group()
    if rank() == 0:
        say_ready()
        dist.all_reduce(torch.ones(2))                                # the others never come
    elif rank() == 1:
        wait_for_those_that_wait()
        say_ready()
        while True: sum(range(100))
    elif rank() == 2:
        wait_for_those_that_wait()
        say_ready()
        collections.deque(itertools.repeat(None), maxlen=0)           # blocked in C, holding the interpreter's lock
    elif rank() == 3:
        ignore_signals()
        say_ready()
        time.sleep(3600)
    elif rank() == 4:
        stay()
    elif rank() == 5:
        say_ready()
        os.kill(os.getpid(), signal.SIGSTOP)
    elif rank() == 6:
        ignore_signals()
        for _ in torch.utils.data.DataLoader(Endless(), num_workers=2, multiprocessing_context="fork"):
            say_ready() if not started else None
            started.append(True)
    elif rank() == 7:
        child = subprocess.Popen(["sleep", "3600"])                   # knows nothing of its parent's death
        daemonize()
        say_ready()
        child.wait()

def daemonize():
    # Leaves the worker's process group in every way that there is; returns when all of it runs.
    reading, writing = os.pipe()
    def leave(is_orphan):
        if os.fork() == 0:
            os.setsid()
            if is_orphan and os.fork():
                os._exit(0)                                           # its child has no parent that we know
            ignore_signals()
            os.write(writing, b".")
            time.sleep(3600)
            os._exit(0)
        os.wait() if is_orphan else None
    leave(False)
    leave(True)
    only_token = {name: value for name, value in os.environ.items() if name == "NBLAUNCH_TEST_KERNEL"}
    for environment in None, only_token:
        subprocess.Popen(["/bin/sleep", "3600"], start_new_session=True, env=environment)
    side = threading.Thread(target=leave, args=(False,))              # a thread that ends before its child
    side.start(); side.join()
    started = 0
    while started < 3:
        started += len(os.read(reading, 3))

started = []
"""

NUM_PROCESSES = 8


def _launch(kernel: Kernel, method: str) -> Cell:
    cell = kernel.submit(
        TRAIN + f"notebook_launcher(train, num_processes={NUM_PROCESSES}, start_method={method!r})"
    )
    for rank in range(NUM_PROCESSES):
        cell.wait_for_text(f"[{rank}] ready")
    # The stopped worker prints before it stops itself.
    kernel.wait_until(
        lambda: any(p.status() == psutil.STATUS_STOPPED for p in kernel.processes()), 180, "a worker to stop"
    )
    return cell


def _kill(kernel: Kernel) -> None:
    kernel.process.kill()


def _kill_group(kernel: Kernel) -> None:
    """Kill the process group, like a server that ends a kernel, or the end of a terminal session."""
    os.killpg(os.getpgid(kernel.pid), signal.SIGKILL)


def _shut_down(kernel: Kernel) -> None:
    """Send a request that a busy kernel does not answer; the client then kills it."""
    manager = kernel._manager
    manager.session.send(kernel._control, "shutdown_request", {"restart": True})
    try:
        kernel.wait_for_exit(0.5)
    except Exception:
        kernel.process.kill()


ENDS: dict[str, Callable[[Kernel], None]] = {
    "SIGKILL to the kernel": _kill,
    "SIGKILL to its process group": _kill_group,
    "restart": _shut_down,
}


@pytest.mark.parametrize(
    ("method", "end"),
    [
        *(("fork", end) for end in ENDS),
        ("forkserver", "SIGKILL to the kernel"),
        thorough("forkserver", "SIGKILL to its process group"),
    ],
)
def test_nothing_outlives_the_kernel(start: Callable[..., Kernel], method: str, end: str) -> None:
    """Spawned workers are children of the kernel like forked ones, and are watched in the same way."""
    kernel = start(is_settled=False)
    _launch(kernel, method)
    processes = kernel.processes()
    assert len(processes) >= NUM_PROCESSES + 2 + 1 + 5 + 1  # data loaders, subprocess, daemons, guardian
    ENDS[end](kernel)
    kernel.wait_for_exit()
    _, left = psutil.wait_procs(processes, LIMIT_S)
    assert left == []
    assert kernel.processes() == []


@pytest.mark.parametrize("method", START_METHODS)
def test_nothing_outlives_a_kernel_killed_while_workers_start(
    start: Callable[..., Kernel], method: str
) -> None:
    kernel = start(is_settled=False)
    before = kernel.processes()
    kernel.submit(TRAIN + f"notebook_launcher(train, num_processes=4, start_method={method!r})")
    kernel.wait_until(lambda: len(kernel.processes()) > len(before), 180, "the first process")
    kernel.kill()
    # A fresh interpreter checks its parent after it has imported nblaunch, which takes seconds on busy cores. An
    # interpreter that has just started does not show its environment yet, so search again.
    kernel.wait_for_no_processes(LIMIT_S)


def test_a_job_in_the_background_ends_with_an_orderly_shutdown(fresh: Kernel, tmp_path: Path) -> None:
    fresh.run(TRAIN + f"job = notebook_launcher(train, num_processes={NUM_PROCESSES}, background=True)")
    fresh.wait_until(lambda: len(fresh.processes()) >= NUM_PROCESSES + 1, 180, "the workers")
    processes = fresh.processes()
    fresh.close()  # fails if anything outlives the kernel
    _, left = psutil.wait_procs(processes, LIMIT_S)  # the system removes the remains of ended processes
    assert left == []


DAEMONS = """
def end_well():
    daemonize()
    print("rea" + "dy")

def raise_error():
    end_well()
    raise ValueError("raised")

def wait():
    end_well()
    time.sleep(3600)

def die():
    end_well()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("function", "error"),
    [("end_well", None), ("raise_error", "ValueError"), ("wait", "KeyboardInterrupt"), ("die", "WorkerDied")],
)
def test_processes_in_other_sessions_end_with_the_job(
    shared: Kernel, function: str, error: str | None
) -> None:
    shared.run(TRAIN + DAEMONS)
    shared.run("own = subprocess.Popen(['/bin/sleep', '3600'], start_new_session=True)")
    of_the_cell = shared.processes()
    assert of_the_cell
    cell = shared.submit(f"notebook_launcher({function}, num_processes=1)")
    cell.wait_for_text("ready")
    if error == "KeyboardInterrupt":
        shared.interrupt()
    cell.wait()
    assert (cell.error and cell.error.name) == error
    _, left = psutil.wait_procs([p for p in shared.processes() if p not in of_the_cell], LIMIT_S)
    assert left == []
    assert "sleep (pid" in cell.stdout
    assert all(process.is_running() for process in of_the_cell)
    shared.run("own.kill(); own.wait()")
