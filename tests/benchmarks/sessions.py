"""Cost and robustness of a session: a command on four ranks, a second call, interrupts, errors, opening and closing.

    python -m tests.benchmarks sessions [--rounds 200]

If ipyparallel is installed, it is measured in the same kernel, in turn.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tests.benchmarks.bench import Row, at_most, call, count, kernel

_SETUP = "import torch, torch.distributed"
_NUM_COMMANDS = 200
_NUM_SESSIONS = 50
_NUM_ERRORS = 50
_RETURNS_WITHIN_S = 1.0

_BODIES = (
    "while True: pass",
    "time.sleep(100)",
    "while True: torch.distributed.all_reduce(t)",
    "while True: t = t @ torch.eye(3)",
    "if os.environ['RANK'] == '0': time.sleep(100)\ntorch.distributed.all_reduce(t)",
    "while True: print('x' * 50); time.sleep(0.001)",
)
"""Code that four ranks run when the interrupt comes; in the fifth, three wait in a collective for the first."""


def measure(rounds: int = 200) -> Iterator[Row]:
    with kernel(_SETUP) as started:
        own_ms, peer_ms = call(started, in_kernel_latency)
    yield at_most("1+1 on 4 ranks, median", own_ms, 10, " ms", 1)
    if peer_ms is not None:
        yield at_most("... over ipyparallel's", own_ms / peer_ms, 0.5)
    with kernel(_SETUP) as started:
        yield at_most(
            "a second call with a process group, over a cold launch",
            call(started, in_kernel_second_call),
            0.2,
        )
    with kernel(_SETUP) as started:
        bad, slowest_s = call(started, in_kernel_interrupts, rounds)
    yield count("interrupts that return with the ranks' names kept", rounds - bad, rounds)
    yield at_most("... the slowest", slowest_s, _RETURNS_WITHIN_S, " s")
    with kernel(_SETUP) as started:
        yield count("errors of a rank that fail the cell", call(started, in_kernel_errors), _NUM_ERRORS)
    with kernel(_SETUP) as started:
        growth = call(started, in_kernel_open_and_close)
        for what, value in growth.items():
            yield at_most(f"{_NUM_SESSIONS} sessions opened and closed: growth of {what}", value, 0, digits=0)
    with kernel(_SETUP) as started:
        share, num_bytes = call(started, in_kernel_idle)
    yield at_most("an idle session of 8 workers: share of a core, kernel and workers", 100 * share, 5, "%", 1)
    yield Row("... memory of its workers (PSS)", f"{num_bytes / 1e6:.0f} MB")


def in_kernel_latency() -> tuple[float, float | None]:
    with _session(4) as session:
        commands: list[Callable[[], object]] = [lambda: session.execute("1+1")]
        with _ipyparallel() as peer:
            if peer is not None:
                commands.append(lambda: peer.apply_sync(_one_plus_one))
            times = [[_milliseconds(command) for command in commands] for _ in range(_NUM_COMMANDS)]
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    return medians[0], medians[1] if medians[1:] else None


def in_kernel_second_call() -> float:
    from nblaunch import notebook_launcher

    with _session(4) as session:
        session.run(_reduce, dashboard="none")
        ratios = []
        for _ in range(9):
            warm_ms = _milliseconds(lambda: session.run(_reduce, dashboard="none"))
            ratios.append(
                warm_ms / _milliseconds(lambda: notebook_launcher(_reduce, (), 4, dashboard="none"))
            )
    return statistics.median(ratios)


def in_kernel_interrupts(rounds: int) -> tuple[int, float]:
    bad, slowest_s = 0, 0.0
    with _session(4) as session:
        session.execute("import os, time, torch; kept = 5; t = torch.ones(3)")
        for number in range(rounds):
            random.seed(number)
            body, delay_s = (
                random.choice(_BODIES),
                random.choice([0.0, 0.001, 0.01, 0.1, 0.5]) * random.random(),
            )
            began_s = time.monotonic()
            is_interrupted = _interrupted(session, body, delay_s)
            slowest_s = max(slowest_s, time.monotonic() - began_s - delay_s)
            bad += not (is_interrupted and set(session["kept"].values()) == {5})
            session.execute("t = torch.ones(3)")
    return bad, slowest_s


def in_kernel_errors() -> int:
    good = 0
    with _session(4) as session:
        for number in range(_NUM_ERRORS):
            failing = (
                f"import torch\nif torch.distributed.get_rank() == {number % 4}: raise KeyError({number})"
            )
            try:
                session.execute(f"{failing}\ntorch.distributed.barrier()")
            except KeyError as error:
                good += error.args == (number,)
    return good


def in_kernel_open_and_close() -> dict[str, int]:
    _open_and_close()
    before = _held()
    for _ in range(_NUM_SESSIONS):
        _open_and_close()
    return {what: number - before[what] for what, number in _held().items()}


def _open_and_close() -> None:
    with _session(2) as session:
        session.execute("1")


def in_kernel_idle(seconds: float = 5.0) -> tuple[float, int]:
    import psutil

    with _session(8) as session:
        session.execute("1")
        processes = [psutil.Process(), *map(psutil.Process, session.pids.values())]
        before = sum(sum(one.cpu_times()[:2]) for one in processes)
        threading.Event().wait(seconds)
        spent = sum(sum(one.cpu_times()[:2]) for one in processes) - before
        return spent / seconds, sum(one.memory_full_info().pss for one in processes[1:])


def _session(num_processes: int) -> Any:
    from nblaunch import Session

    return Session(num_processes, threads_per_process=1)


def _one_plus_one() -> int:
    return 1 + 1


def _reduce() -> None:
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group()
    dist.all_reduce(torch.ones(1))


@contextlib.contextmanager
def _ipyparallel() -> Iterator[Any]:
    """Start four engines of ipyparallel; yield None if it is not installed."""
    try:
        import ipyparallel
    except ImportError:
        yield None
        return
    with ipyparallel.Cluster(n=4, log_level=40) as client:
        yield client[:]


def _interrupted(session: Any, body: str, delay_s: float) -> bool:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT)).start()
            session.execute(body)
    except KeyboardInterrupt:
        return True
    return False


def _milliseconds(command: Callable[[], object]) -> float:
    start = time.perf_counter()
    command()
    return (time.perf_counter() - start) * 1e3


def _held() -> dict[str, int]:
    import psutil

    own = psutil.Process()
    return {
        "descriptors": own.num_fds(),
        "threads": own.num_threads(),
        "processes": len(own.children(recursive=True)),
    }
