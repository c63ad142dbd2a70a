"""How often failures and interrupts end well, counted over many fresh kernels.

    python -m tests.benchmarks lotteries [--errors 50] [--kills 50] [--interrupts 200] [--peers 10] [--jobs 3]

* error: rank 1 raises while rank 0 waits in a collective. The cell should soon raise that exception.
* kill: rank 1 kills itself with SIGKILL while rank 0 waits. The error should name the rank and the signal.
* interrupt: at a random time while workers compute, sleep, print or wait. The cell should raise KeyboardInterrupt, the
  next launch in the same kernel should work, and no process may be left.

Peers have easier terms: an error counts if its message is anywhere in the cell's output, and any error counts for an
interrupt. Each peer has its own port, and each interrupt its own kernel, because a hanging kernel would end the series.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.bench import Row, count, free_port, kernel
from tests.kernels import Cell, Kernel, LeftBehind

LAUNCHERS = ("nblaunch", "accelerate", "torch.multiprocessing")
MESSAGE = "batch 7 is broken"
MAX_S = 1.5
_PEER_TIMEOUT_S = 30.0
_CELL = (
    "from tests.benchmarks import lotteries\nlotteries.in_kernel_launch({launcher!r}, {name!r}, {folder!r})"
)


@dataclass(frozen=True)
class Draw:
    """One failure: whether the cell showed it correctly, and the seconds from its cause to the end of the cell."""

    is_good: bool
    seconds: float
    shown: str


def measure(
    errors: int = 50, kills: int = 50, interrupts: int = 200, peers: int = 10, jobs: int = 3
) -> Iterator[Row]:
    for launcher in LAUNCHERS:
        is_ours = launcher == "nblaunch"
        yield from _failures(launcher, "error", errors if is_ours else min(peers, errors), jobs)
        yield from _failures(launcher, "kill", kills if is_ours else min(peers, kills), jobs)
        yield from _interrupts(launcher, interrupts if is_ours else min(peers, interrupts), jobs)


# --- errors and kills ------------------------------------------------------------------------------------------------


def _failures(launcher: str, name: str, of: int, jobs: int) -> Iterator[Row]:
    if not of:
        return
    draws = _concurrently(lambda _: _fail(launcher, name), of, jobs)
    good = sum(draw.is_good for draw in draws)
    times = sorted(draw.seconds for draw in draws)
    note = f"{statistics.median(times):.2f} s after it, at most {times[-1]:.2f} s"
    what = {"error": "the original exception arrives", "kill": "rank and SIGKILL are named"}[name]
    if launcher != "nblaunch":
        yield Row(f"{launcher}: {what}", f"{good}/{of} ({note})")
        return
    yield count(f"{launcher}: {what}", good, of, note)
    yield count(f"{launcher}: ... within {MAX_S} s", sum(t <= MAX_S for t in times), of)
    for draw in draws:
        if not draw.is_good:
            print(f"a bad one:\n{draw.shown}", file=sys.stderr)


def _fail(launcher: str, name: str) -> Draw:
    with tempfile.TemporaryDirectory() as folder, _peer_kernel(launcher) as started:
        cell = started.submit(_CELL.format(launcher=launcher, name=name, folder=folder))
        is_done = _wait(cell, _PEER_TIMEOUT_S)
        ended_s = time.time()
        cause = Path(folder, "cause")
        since_s = float(cause.read_text()) if cause.exists() else ended_s
        is_good = is_done and _is_as_wanted(launcher, name, cell)
        return Draw(is_good, ended_s - since_s, cell.describe())


def _is_as_wanted(launcher: str, name: str, cell: Cell) -> bool:
    error = cell.error
    if error is None:
        return False
    if name == "error":
        if launcher == "nblaunch":
            return error.name == "ValueError" and error.value == MESSAGE
        return MESSAGE in error.text
    text = error.value if launcher == "nblaunch" else error.text
    return "SIGKILL" in text and ("rank 1" in text or "process 1" in text or "local_rank: 1" in text)


# --- interrupts ------------------------------------------------------------------------------------------------------


def _interrupts(launcher: str, of: int, jobs: int) -> Iterator[Row]:
    if not of:
        return
    if launcher == "nblaunch":
        with _peer_kernel(launcher) as started:
            draws = [_interrupt(launcher, started) for _ in range(of)]
    else:
        draws = _concurrently(lambda _: _interrupt_alone(launcher), of, jobs)
    good, survivors = sum(is_good for is_good, _ in draws), sum(left for _, left in draws)
    if launcher != "nblaunch":
        yield Row(
            f"{launcher}: interrupt, then a good launch", f"{good}/{of} ({survivors} processes survive)"
        )
        return
    yield count(f"{launcher}: interrupt, then a good launch", good, of)
    yield Row(f"{launcher}: processes that survive it", str(survivors), "0", survivors == 0)


def _interrupt_alone(launcher: str) -> tuple[bool, int]:
    with _peer_kernel(launcher) as started:
        return _interrupt(launcher, started)


def _interrupt(launcher: str, started: Kernel) -> tuple[bool, int]:
    """Return whether interrupt and relaunch succeeded, and how many processes were left."""
    with tempfile.TemporaryDirectory() as folder:
        name = random.choice(["compute", "sleep", "talk", "wait"])
        cell = started.submit(_CELL.format(launcher=launcher, name=name, folder=folder))
        cell.wait_for(lambda cell: cell.contents("execute_input"), what="the cell to run")
        time.sleep(random.uniform(0.02, 0.6))
        started.interrupt()
        if not _wait(cell, _PEER_TIMEOUT_S):
            return False, 0
        name_shown = cell.error.name if cell.error is not None else ""
        was_interrupted = name_shown == "KeyboardInterrupt" if launcher == "nblaunch" else bool(name_shown)
        again = started.submit(_CELL.format(launcher=launcher, name="quick", folder=folder))
        is_good = _wait(again, _PEER_TIMEOUT_S) and again.error is None
        num_ran = len(list(Path(folder).glob("quick-rank*")))
        left = _survivors(started)
        is_well = was_interrupted and is_good and num_ran == 2
        if launcher == "nblaunch" and not (is_well and left == 0):
            print(f"a bad one ({left} left):\n{cell.describe()}\n{again.describe()}", file=sys.stderr)
        return is_well, left


def _survivors(started: Kernel) -> int:
    try:
        started.wait_for_no_processes(3.0)
    except LeftBehind:
        return len(started.processes())
    return 0


# --- shared ----------------------------------------------------------------------------------------------------------


def _concurrently(draw: Callable[[int], Any], times: int, jobs: int) -> list[Any]:
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(draw, range(times)))


def _peer_kernel(launcher: str) -> Any:
    return kernel(env={"ACCELERATE_USE_CPU": "true"} if launcher == "accelerate" else {}, check=False)


def _wait(cell: Cell, timeout_s: float) -> bool:
    """Return whether the cell ended in time; interrupt a hanging kernel twice, then give up."""
    try:
        cell.wait(timeout_s)
    except AssertionError:
        return False
    return True


def in_kernel_launch(launcher: str, name: str, folder: str) -> None:
    function = {"error": _error, "kill": _kill, "quick": _quick, "wait": _wait_for_ever}.get(name, _loop)
    args = (folder, name)
    if launcher == "torch.multiprocessing":
        from torch.multiprocessing import start_processes

        start_processes(_as_rank, (function, args, free_port()), nprocs=2, start_method="fork")
        return
    if launcher == "accelerate":
        from accelerate import notebook_launcher as peer

        peer(function, args, num_processes=2, use_port=str(free_port()))
        return
    from nblaunch import notebook_launcher

    notebook_launcher(function, args, num_processes=2)


def _as_rank(rank: int, function: Callable[..., None], args: Sequence[Any], port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    function(*args)


def _join() -> int:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return dist.get_rank()


def _all_reduce() -> None:
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(8))


def _note_cause(folder: str) -> None:
    time.sleep(random.uniform(0.0, 0.3))
    Path(folder, "cause").write_text(repr(time.time()))


def _error(folder: str, name: str) -> None:
    if _join() == 1:
        _note_cause(folder)
        raise ValueError(MESSAGE)
    _all_reduce()


def _kill(folder: str, name: str) -> None:
    if _join() == 1:
        _note_cause(folder)
        os.kill(os.getpid(), signal.SIGKILL)
    _all_reduce()


def _quick(folder: str, name: str) -> None:
    Path(folder, f"quick-rank{_join()}").touch()
    _all_reduce()


def _wait_for_ever(folder: str, name: str) -> None:
    if _join() == 1:
        time.sleep(600)
    _all_reduce()


def _loop(folder: str, name: str) -> None:
    import torch

    _join()
    for i in range(10**9):
        if name == "compute":
            torch.ones(64, 64) @ torch.ones(64, 64)
            _all_reduce()
        elif name == "sleep":
            time.sleep(1)
        else:
            print(f"step {i}")
