"""Whether the launcher names the cause of slow steps, and reports nothing about loops that run at full speed.

The loops are slow for one of ten reasons, or clean but on a machine whose cores other processes use. Each is a launch
of two ranks, which ends when a cause is named, or after some time. Results vary, so run it often; run slow loops alone.

    python -m tests.benchmarks.slow_steps SECONDS NUM_SLOW NUM_CLEAN
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nblaunch.events import Event, Note
from nblaunch.launcher.plan import plan_launch
from nblaunch.launcher.runner import JobRunner
from nblaunch.spec import LaunchSpec
from nblaunch.wire.board import SlotReading
from tests.benchmarks.bench import Row
from tests.diagnosis import slow_programs

SECONDS = 90.0
CLEAN_SECONDS = 20.0
NUM_SLOW, NUM_CLEAN = 40, 40
HOG = "while True: pass"


class Named:
    """A listener that collects notices about slow steps, and then stops the job."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.seen = threading.Event()

    def on_event(self, event: Event) -> None:
        if isinstance(event, Note) and event.kind == "slow" and event.text:
            self.texts.append(event.text)
            self.seen.set()

    def on_readings(self, readings: Sequence[SlotReading]) -> None:
        pass

    def close(self) -> None:
        self.seen.set()


@contextmanager
def hogs(cores: Sequence[int | None]) -> Iterator[list[int]]:
    """Keep cores busy while the block runs, with one process per core, pinned to it; None: not pinned."""
    processes = [subprocess.Popen([sys.executable, "-c", HOG]) for _ in cores]
    try:
        for process, core in zip(processes, cores, strict=True):
            if core is not None:
                os.sched_setaffinity(process.pid, {core})
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()


def named_in(function: Callable[[Any], None], seconds: float) -> list[str]:
    """Return the notices about a loop that appear within some seconds."""
    listener = Named()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["SLOW_FOLDER"] = folder
        spec = LaunchSpec(slow_programs.run, (function,), 2, backend="cpu")
        runner = JobRunner(spec, plan_launch(spec), [listener])
        stopper = threading.Thread(target=_stop, args=(runner, listener, seconds))
        stopper.start()
        runner.run()
        stopper.join()
    return listener.texts


def _stop(runner: JobRunner, listener: Named, seconds: float) -> None:
    listener.seen.wait(seconds)
    runner.stop()


def slow_run(function: Callable[[Any], None], seconds: float = SECONDS) -> list[str]:
    """Return the notices about a loop that is slow for a reason."""
    cores = sorted(os.sched_getaffinity(0))
    with hogs([cores[1 % len(cores)]] if function is slow_programs.shared_core else []):
        return named_in(function, seconds)


def measure(seconds: float = SECONDS, num_slow: int = NUM_SLOW, num_clean: int = NUM_CLEAN) -> Iterator[Row]:
    wanted = list(slow_programs.SLOW.items())
    wrong, num_right = [], 0
    for number in range(num_slow):
        function, part = wanted[number % len(wanted)]
        began_s, texts = time.monotonic(), slow_run(function, seconds)
        is_right = bool(texts) and part in texts[0]
        num_right += is_right
        print(f"{function.__name__}: {is_right} {time.monotonic() - began_s:.0f} s {texts}", flush=True)
        if not is_right:
            wrong.append(f"{function.__name__}: {texts or 'nothing'}")
    limit = -(-num_slow * 38 // 40)
    yield Row(
        "slow loops whose cause is named", f"{num_right} of {num_slow}", f">= {limit}", num_right >= limit
    )
    num_silent = 0
    for number in range(num_clean):
        function = slow_programs.CLEAN[number % len(slow_programs.CLEAN)]
        with hogs([None] * (number % 3)):
            texts = named_in(function, CLEAN_SECONDS)
        num_silent += not texts
        print(f"{function.__name__}, {number % 3} hogs: {texts}", flush=True)
    yield Row(
        "clean loops on a busy machine without a notice",
        f"{num_silent} of {num_clean}", f"= {num_clean}", num_silent == num_clean,
    )  # fmt: skip


if __name__ == "__main__":
    arguments = [float(argument) for argument in sys.argv[1:]] or [SECONDS, NUM_SLOW, NUM_CLEAN]
    for row in measure(arguments[0], *map(int, arguments[1:])):
        print(row)
