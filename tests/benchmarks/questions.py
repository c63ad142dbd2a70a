"""Whether every request to a job is answered or without effect, whenever the job ends: ``job.stacks()`` in a loop.

    python -m tests.benchmarks.questions [--rounds 50]

Background jobs of two ranks end at random times and in random ways: by returning, failing, a restart, a kill, an
interrupt, a cancellation, a stop or a termination. Meanwhile the main thread of the kernel asks where the ranks are.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator

from tests.benchmarks.bench import Row, call, count, kernel, show

_PATIENCE_S = 15.0
_WAYS = ("return", "raise", "restart", "kill", "interrupt", "cancel", "stop")
_BATCH = 10  # rounds of one cell


def measure(rounds: int = 50) -> Iterator[Row]:
    hung: list[str] = []
    with kernel(check=False) as started:
        for first in range(0, rounds, _BATCH):
            hung += call(started, in_kernel_rounds, first, min(_BATCH, rounds - first))
    yield count("job.stacks() in a loop: rounds without a hang", rounds - len(hung), rounds, ", ".join(hung))


def in_kernel_rounds(seed: int, rounds: int) -> list[str]:
    random.seed(seed)
    return [way for i in range(rounds) if _hangs(way := _WAYS[(seed + i) % len(_WAYS)])]


def _hangs(way: str) -> bool:
    from nblaunch import notebook_launcher

    seconds = random.uniform(0.0, 0.5)
    restarts = 1 if way == "restart" else 0
    job = notebook_launcher(
        _work,
        (way, seconds),
        2,
        background=True,
        dashboard="none",
        max_restarts=restarts,
        interrupt_grace_s=1,
    )
    if way in ("interrupt", "cancel", "stop"):
        threading.Timer(seconds, getattr(job, way)).start()
    try:
        while job.is_running:
            job.ask_stacks().result(_PATIENCE_S)
        job.ask_stacks().result(_PATIENCE_S)
        job.wait(_PATIENCE_S)
    except (concurrent.futures.TimeoutError, TimeoutError):
        return True
    return False


def _work(way: str, seconds: float) -> None:
    from nblaunch import context

    current = context.current()
    time.sleep(seconds if way in ("return", "raise", "restart", "kill") else 2 * seconds + 0.2)
    if current.topology.rank == 0:
        return
    if way == "raise" or (way == "restart" and current.attempt == 0):
        raise ValueError(way)
    if way == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=50)
    sys.exit(0 if show("Questions", measure(**vars(parser.parse_args()))) else 1)
