"""Failures and kills at random moments of a launch on two nodes, with the required outcomes.

    python -m tests.engines.lottery [--engine processes] [--failures 50] [--kills 100]

* failure: a rank raises, dies, returns early or hangs. Type, text and notes of the error are the same as on one
  machine, except for processes and labels of nodes.
* kill: a rank, a node process, the kernel or the process of a detached job gets SIGKILL at a random moment after the
  call of the launcher; with Ray also an actor or the driver. The error names the victim, nothing is left after some
  seconds, and the next launch works.

The program prints every draw that ends otherwise, with all details.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import psutil

from tests.engines.conftest import FAILING, PREAMBLE, comparable
from tests.engines.ray_cluster import cluster
from tests.kernels import Kernel

TOKEN = "NBLAUNCH_LOTTERY"
"""Environment variable that marks the processes of one lottery, so that it kills no others."""

LEFT_S = 3.0
"""Seconds that processes may take to end."""

BUSY_LEFT_S = 10.0
"""The same on an overloaded machine, for example while all tests run."""

FAILURES = ("error", "SIGKILL", "SIGSEGV", "exit 0", "return", "unpicklable result", "hang")
VICTIMS = {"processes": ("rank", "node", "kernel", "job process")}
VICTIMS["ray"] = (*VICTIMS["processes"], "actor", "driver")

CELL = (
    FAILING
    + """
import random

def work():
    dist.init_process_group("gloo")
    while True:
        dist.all_reduce(torch.ones(2))
        time.sleep(0.01)

def error_of(what, who, **settings):
    limits = {"hang_timeout_s": 3, "on_hang": "stop"} if what == "hang" else {}
    try:
        return "nothing", str(launch(train, what, who, dashboard="none", **limits, **settings)), "", 0
    except BaseException as error:
        code = error.code if isinstance(error, MyError) else 0
        return type(error).__name__, str(error), "\\n".join(getattr(error, "__notes__", ())), code

def named(*parts):
    found = []
    for process in psutil.process_iter():
        try:
            line, token = " ".join(process.cmdline()), process.environ().get("NBLAUNCH_LOTTERY")
        except psutil.Error:
            continue
        if token == os.environ["NBLAUNCH_LOTTERY"] and all(part in line for part in parts):
            found.append(process.pid)
    return found

def victims(victim, job):
    if victim == "rank":
        return [pid for pid in job.pids.values() if psutil.pid_exists(pid)]
    if victim == "node":
        both = named("nblaunch.engines.node")  # ranks are forked from it, and have its command line
        return [pid for pid in both if psutil.pid_exists(pid) and psutil.Process(pid).ppid() not in both]
    if victim == "job process":
        return named("job_process")
    if victim == "driver":
        return named("ray_driver")
    if victim == "actor":
        return [pid for pid in named("ray::") if any("engines.node" in " ".join(c.cmdline())
                for c in psutil.Process(pid).children())]

def draw_kill(victim, delay_s, **settings):
    job = launch(work, background=True, dashboard="none", **settings)
    time.sleep(delay_s)
    deadline = time.monotonic() + 30
    while not (pids := victims(victim, job)) and time.monotonic() < deadline:
        time.sleep(0.002)  # it is to come
    killed_s = time.monotonic()
    for pid in random.sample(pids, 1) if pids else ():
        os.kill(pid, signal.SIGKILL)
    try:
        return "nothing", str(job.result(90)), 0.0
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic() - killed_s
    finally:
        job.cancel()
"""
)


@dataclass(frozen=True)
class Draw:
    """One draw.

    Args:
        what: the fault.
        wrong: what is wrong with the outcome; empty if nothing is.
        seconds: duration of the draw.
        left_s: seconds after the draw until no process was left.
    """

    what: str
    wrong: str
    seconds: float
    left_s: float = 0.0


class Lottery:
    """Draws failures and kills in kernels, with an engine.

    Args:
        engine: ``"processes"`` or ``"ray"``.
        address: address of the Ray cluster; empty without one.
        seed: seed of the draws.
        left_s: seconds that processes may take to end.
    """

    def __init__(self, engine: str, address: str = "", seed: int = 0, left_s: float = LEFT_S) -> None:
        self.engine = engine
        self._left_s = left_s
        self._random = random.Random(seed)
        self._environment = {"RAY_ADDRESS": address, TOKEN: os.environ[TOKEN]}
        self._local: dict[tuple[str, int], list[str]] = {}

    @contextmanager
    def kernel(self) -> Iterator[Kernel]:
        with (
            tempfile.TemporaryDirectory(prefix="lottery-") as folder,
            Kernel.start(env={"NBLAUNCH_LOG_DIR": folder, **self._environment}) as kernel,
        ):
            kernel.run(PREAMBLE)
            kernel.run(CELL)
            yield kernel

    # --- failures ------------------------------------------------------------------------------------------------

    def fail(self, kernel: Kernel, what: str) -> Draw:
        """Let a random rank fail; compare the error with the local engine's error."""
        who = -1 if what == "unpicklable result" else self._random.randrange(4)
        if (what, who) not in self._local:
            self._local[what, who] = self._error_of(kernel, what, who, "engine='local', num_nodes=1")
        began_s = time.monotonic()
        there = self._error_of(kernel, what, who, f"engine={self.engine!r}")
        here = self._local[what, who]
        wrong = "" if there == here and here[0] != "nothing" else f"\n{there}\ninstead of\n{here}"
        seconds = time.monotonic() - began_s
        left, left_s = self._what_is_left(kernel)
        return Draw(f"{what} in rank {who}", wrong or left, seconds, left_s)

    def _error_of(self, kernel: Kernel, what: str, who: int, settings: str) -> list[str]:
        value = kernel.run(f"error_of({what!r}, {who}, {settings})", timeout_s=180).value
        # The end of the other ranks depends on how soon they were signalled.
        return [re.sub(r"PATH\n.*", "PATH", comparable(str(part)), flags=re.DOTALL) for part in value]

    # --- kills ---------------------------------------------------------------------------------------------------

    def kill(self, kernel: Kernel, victim: str, span_s: float) -> Draw:
        """Kill a victim other than the kernel within ``span_s`` seconds after the call of the launcher."""
        delay_s = self._random.uniform(0.0, span_s)
        detach = ", detach=True" if victim == "job process" else ""
        call = f"draw_kill({victim!r}, {delay_s}, engine={self.engine!r}{detach})"
        name, text, seconds = kernel.run(call, timeout_s=240).value
        left, left_s = self._what_is_left(kernel)
        wrong = self._judge(victim, name, text) or left
        if not wrong and self._random.random() < 0.25:
            again = kernel.run(f"launch(rank, return_all=True, engine={self.engine!r})", timeout_s=180).value
            wrong = "" if again == [0, 1, 2, 3] else f"the next launch returned {again}"
        return Draw(f"{victim} killed {delay_s:.2f} s after the call", wrong, seconds, left_s)

    def _judge(self, victim: str, name: str, text: str) -> str:
        wanted = {
            "rank": r"rank \d .*SIGKILL",
            "node": r"node \d \(host .*SIGKILL",
            "job process": r"",
            "driver": r"",
            "actor": r"node \d \(host |actor",
        }[victim]
        is_good = name in ("WorkerDied", "NodeLost", "LaunchError", "JobLost") and re.search(
            wanted, text, re.DOTALL
        )
        return "" if is_good else f"{name}: {text}"

    def kill_kernel(self, span_s: float) -> Draw:
        """Kill a kernel within ``span_s`` seconds after the call of the launcher."""
        delay_s = self._random.uniform(0.0, span_s)
        with self.kernel() as kernel:
            cell = kernel.submit(f"launch(work, engine={self.engine!r})")
            time.sleep(delay_s)
            kernel.kill()
            wrong, left_s = self._what_is_left(kernel)
            del cell
        return Draw(f"kernel killed {delay_s:.2f} s after the call", wrong, left_s, left_s)

    def _what_is_left(self, kernel: Kernel) -> tuple[str, float]:
        """Return what was left after some seconds, or an empty string, and the seconds until nothing was left."""
        began_s = time.monotonic()
        try:
            kernel.wait_for_no_processes(self._left_s)
        except AssertionError as error:
            return str(error), self._left_s
        while left := _node_processes():
            if time.monotonic() - began_s > self._left_s:
                return f"left: {left}", self._left_s
            time.sleep(0.05)
        return "", time.monotonic() - began_s


def _node_processes() -> list[str]:
    """Return the node programs of this lottery, including those on nodes of a Ray cluster."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if "nblaunch.engines.node" in line and process.environ().get(TOKEN) == os.environ[TOKEN]:
                found.append(f"{process.pid}: {line}")
    return found


def main() -> None:
    """Draw as often as the arguments say; print each bad draw, and times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="processes", choices=VICTIMS)
    parser.add_argument("--failures", type=int, default=50)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument(
        "--span", type=float, default=12.0, help="seconds of a launch in which victims are killed"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ[TOKEN] = secrets.token_hex(8)
    with cluster() if options.engine == "ray" else nullcontext("") as address:
        lottery = Lottery(options.engine, address, options.seed)
        draws = list(_draw(lottery, options))
    for kind in ("", "killed"):
        times = [draw.seconds for draw in draws if ("killed" in draw.what) == bool(kind)]
        if times:
            print(
                f"{kind or 'failed'}: {len(times)}, median {statistics.median(times):.1f} s, at most {max(times):.1f} s"
            )
    print(f"nothing was left after {max((draw.left_s for draw in draws), default=0.0):.2f} s at most")
    bad = sum(bool(draw.wrong) for draw in draws)
    print(f"{len(draws) - bad} of {len(draws)} ended well")
    sys.exit(bad > 0)


def _draw(lottery: Lottery, options: argparse.Namespace) -> Iterator[Draw]:
    with lottery.kernel() as kernel:
        for number in range(options.failures):
            yield _shown(lottery.fail(kernel, FAILURES[number % len(FAILURES)]))
    victims = VICTIMS[lottery.engine]
    others = [one for one in victims if one != "kernel"]
    num_kernels = options.kills // len(victims)
    with lottery.kernel() as kernel:
        for number in range(options.kills - num_kernels):
            yield _shown(lottery.kill(kernel, others[number % len(others)], options.span))
    for _ in range(num_kernels):
        yield _shown(lottery.kill_kernel(options.span))


def _shown(draw: Draw) -> Draw:
    left = f"nothing left after {draw.left_s:.2f} s"
    print(f"{draw.seconds:6.1f} s  {draw.what}: {draw.wrong or f'good, {left}'}", flush=True)
    return draw


if __name__ == "__main__":
    main()
