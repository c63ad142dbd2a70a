"""Kills at random moments of a launch on two nodes, with the required outcomes.

    python -m tests.engines.lottery [--engine processes] [--kills 100]

A rank, a node process, the kernel or the process of a detached job gets SIGKILL at a random moment after the call of
the launcher; with Ray also an actor, the driver or a raylet. The error names the victim, nothing is left after some
seconds, and the next launch works. Some are killed in a launch that starts its nodes, others on kept nodes, whose
programs start again in the next launch.

The program prints every draw that ends otherwise, with all details, and a table.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass

import psutil

from tests.engines.conftest import PREAMBLE, path_with_ssh
from tests.engines.ray_cluster import RayCluster, cluster
from tests.kernels import Kernel

TOKEN = "NBLAUNCH_LOTTERY"
"""Environment variable that marks the processes of one lottery, so that it kills no others."""

LEFT_S = 3.0
"""Seconds that processes may take to end."""

BUSY_LEFT_S = 10.0
"""The same on an overloaded machine, for example while all tests run."""

VICTIMS = dict.fromkeys(("processes", "ssh"), ("kernel", "rank", "node", "job process"))
VICTIMS["ray"] = (*VICTIMS["processes"], "actor", "driver", "raylet")
HOSTS = "hosts=['one', 'other']"

NUM_RANKS = 4
STARTS_AGAIN_S = 5.0
"""Seconds after which ranks that run are those of a launch that has started all programs again."""

NAMED_S = 2.0
"""Seconds until the error names a node whose raylet was killed, once the launch uses the node."""

CELL = """
def work():
    dist.init_process_group("gloo")
    while True:
        dist.all_reduce(torch.ones(2))
        time.sleep(0.05)

nodes = None

def lend(**settings):
    global nodes
    nodes = nodes or nblaunch.Nodes(2, **settings)
    return nodes

def error_of_work(detach=False, **settings):
    try:
        job = launch(work, dashboard="none", background=detach, detach=detach, **settings)
        if detach:
            job.result()
        return "nothing", "", time.monotonic()
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic()
"""


@dataclass(frozen=True)
class Draw:
    """One draw.

    Args:
        kind: the victim.
        what: the kill, with details.
        wrong: what is wrong with the outcome; empty if nothing is.
        seconds: seconds from the kill to the error.
        left_s: seconds after the error until no process was left.
        num_launches: how many launches worked after earlier draws.
        was_running: whether all ranks ran at the time of the kill.
    """

    kind: str
    what: str
    wrong: str
    seconds: float
    left_s: float = 0.0
    num_launches: int = 0
    was_running: bool = True


class Lottery:
    """Draws kills in kernels, with an engine.

    Args:
        engine: ``"processes"``, ``"ssh"`` (a stub that runs the command on this machine) or ``"ray"``.
        cluster: the Ray cluster; None without one.
        seed: seed of the draws.
        left_s: seconds that processes may take to end.
    """

    def __init__(
        self, engine: str, cluster: RayCluster | None = None, seed: int = 0, left_s: float = LEFT_S
    ) -> None:
        self.engine = engine
        self._settings = f"engine={engine!r}" + (f", {HOSTS}" if engine == "ssh" else "")
        self._cluster = cluster
        self._left_s = left_s
        self._random = random.Random(seed)
        self._environment = {"RAY_ADDRESS": cluster.address if cluster else "", TOKEN: os.environ[TOKEN]}

    @contextmanager
    def kernel(self) -> Iterator[Kernel]:
        with (
            tempfile.TemporaryDirectory(prefix="lottery-") as folder,
            Kernel.start(
                env={"NBLAUNCH_LOG_DIR": folder, "PATH": path_with_ssh(folder), **self._environment}
            ) as kernel,
        ):
            kernel.run(PREAMBLE)
            kernel.run(CELL)
            yield kernel

    # --- kills ---------------------------------------------------------------------------------------------------

    def kill(self, kernel: Kernel, victim: str, span_s: float, *, is_kept: bool = False) -> Draw:
        """Kill a victim other than the kernel within ``span_s`` seconds after the call of the launcher.

        Args:
            is_kept: launch on kept nodes, after a launch that must work.
        """
        delay_s = self._random.uniform(0.0, span_s)
        what = f"{victim} killed {delay_s:.2f} s after the call" + (" on kept nodes" if is_kept else "")
        settings = f"engine=lend({self._settings})" if is_kept else self._settings
        if is_kept and (wrong := self._launch(kernel, settings)):
            return Draw(victim, f"before: {what}", wrong, 0.0)
        idle = {
            process.pid
            for process in (*kernel.processes(), *_processes("nblaunch.engines.node", "ray::Node"))
        }
        detach = ", detach=True" if victim == "job process" else ""
        cell = kernel.submit(f"error_of_work({settings}{detach})")
        time.sleep(delay_s)
        stays = set() if is_kept else idle
        victims: list[psutil.Process] = []

        def is_there() -> bool:
            victims[:] = _victims(victim, stays)
            if victim == "job process":  # the launcher's child forks it and ends
                victims[:] = [one for one in victims if not _is_child(one, kernel.pid)]
            return bool(victims) or cell.is_done

        kernel.wait_until(is_there, 180.0, "the victim", cell)
        was_running = len(_ranks(stays)) == NUM_RANKS
        is_watched = was_running or any(one.pid not in stays for one in _processes("ray::Node"))
        killed_s = time.monotonic()
        if victims:
            with suppress(psutil.NoSuchProcess):  # the launch has just failed
                self._random.choice(victims).kill()

        def is_over() -> bool:
            is_early = is_kept and not was_running and time.monotonic() - killed_s > STARTS_AGAIN_S
            return cell.is_done or (is_early and len(_ranks(stays)) == NUM_RANKS)

        kernel.wait_until(is_over, 240.0, "the error", cell)
        if not cell.is_done:
            kernel.interrupt()
        name, text, ended_s = cell.wait().value
        seconds = ended_s - killed_s
        if victim == "rank" and is_kept:
            stays = idle
        # If a kept program dies before the launch uses it, the launch starts all programs again and keeps those.
        has_started_again = is_kept and not was_running and name == "KeyboardInterrupt"
        left, left_s = ("", 0.0) if has_started_again else self._what_is_left(kernel, stays)
        wrong = "" if has_started_again else self._judge(victim, name, text, seconds if is_watched else 0.0)
        wrong = wrong or left
        if victim == "raylet":
            assert self._cluster is not None, "only Ray has raylets"
            self._cluster.add_node()
        what = f"{what}, {'while ranks ran' if was_running else 'before'}"
        return Draw(victim, what, wrong, seconds, left_s, is_kept, was_running)

    def _launch(self, kernel: Kernel, settings: str) -> str:
        """Launch; return what is wrong with the outcome."""
        cell = kernel.submit(f"launch(rank, return_all=True, {settings})").wait()
        return "" if cell.result == "[0, 1, 2, 3]" else f"the next launch: {cell.describe()}"

    def _judge(self, victim: str, name: str, text: str, seconds: float) -> str:
        wanted = {
            "rank": r"rank \d .*SIGKILL",
            "node": r"node \d \(host .*SIGKILL",
            "job process": r"process",
            "driver": r"Ray driver",
            "actor": r"node \d \(host |actor",
            "raylet": r"raylet (of \S+ )?has died",
        }[victim]
        is_good = name in ("WorkerDied", "NodeLost", "LaunchError", "JobLost") and re.search(
            wanted, text, re.DOTALL
        )
        is_late = victim == "raylet" and seconds > NAMED_S
        return "" if is_good and not is_late else f"{name} after {seconds:.2f} s: {text}"

    def kill_kernel(self, span_s: float, *, is_kept: bool = False) -> Draw:
        """Kill a kernel within ``span_s`` seconds after the call of the launcher."""
        delay_s = self._random.uniform(0.0, span_s)
        settings = f"engine=lend({self._settings})" if is_kept else self._settings
        what = f"kernel killed {delay_s:.2f} s after the call" + (" on kept nodes" if is_kept else "")
        idle = {
            process.pid for process in _processes("nblaunch.engines.node", "ray::Node")
        }  # another kernel's
        with self.kernel() as kernel:
            if is_kept and (wrong := self._launch(kernel, settings)):
                return Draw("kernel", f"before: {what}", wrong, 0.0)
            kernel.submit(f"launch(work, {settings})")
            time.sleep(delay_s)
            was_running = len(_ranks(idle)) == NUM_RANKS
            kernel.kill()
            wrong, left_s = self._what_is_left(kernel, idle)
        what = f"{what}, {'while ranks ran' if was_running else 'before'}"
        return Draw("kernel", what, wrong, 0.0, left_s, is_kept, was_running)

    def _what_is_left(self, kernel: Kernel, stays: Collection[int] = ()) -> tuple[str, float]:
        """Return what was left after some seconds, or an empty string, and the seconds until nothing was left.

        Args:
            stays: processes that may be left, because they are those of kept nodes.
        """
        began_s = time.monotonic()
        while left := [
            one
            for one in (*kernel.processes(), *_processes("nblaunch.engines.node", "ray::Node"))
            if one.pid not in stays
        ]:
            if time.monotonic() - began_s > self._left_s:
                return f"left: {[f'{one.pid}: {_line(one)[-200:]}' for one in left]}", self._left_s
            time.sleep(0.1)
        return "", time.monotonic() - began_s


def _victims(victim: str, others: Collection[int]) -> list[psutil.Process]:
    """Return the processes of a kind that run for the present launch.

    Args:
        others: processes that do not.
    """
    if victim == "rank":
        found = _ranks(others)
    elif victim == "node":
        found = [one for one in _processes("nblaunch.engines.node") if one not in _ranks(others)]
    elif victim == "raylet":  # not the head's, on which the cluster depends
        found = [one for one in _processes("raylet/raylet") if "--head" not in _line(one)]
    else:
        part = {"job process": "job_process", "driver": "ray_driver", "actor": "ray::Node"}[victim]
        found = _processes(part)
    return [one for one in found if one.pid not in others]


def _is_child(process: psutil.Process, parent: int) -> bool:
    try:
        return process.ppid() == parent
    except psutil.Error:  # it has ended
        return True


def _ranks(others: Collection[int]) -> list[psutil.Process]:
    """Return the ranks: node programs whose siblings come from the same program, two on each node."""
    parents: dict[int, list[psutil.Process]] = {}
    for one in _processes("nblaunch.engines.node"):
        if one.pid not in others:
            with suppress(psutil.Error):
                parents.setdefault(one.ppid(), []).append(one)
    programs = {one.pid for children in parents.values() for one in children}
    return [
        one
        for parent, children in parents.items()
        if parent in programs and len(children) == NUM_RANKS // 2
        for one in children
    ]


def _processes(*parts: str) -> list[psutil.Process]:
    """Return this lottery's processes whose command line contains one of the parts, with those of a Ray cluster."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            line = _line(process)
            if any(part in line for part in parts) and process.environ().get(TOKEN) == os.environ[TOKEN]:
                found.append(process)
    return found


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()).strip()  # a title is padded with spaces
    except psutil.Error:
        return ""


def main() -> None:
    """Draw as often as the arguments say; print each bad draw, and times."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", default="processes", choices=VICTIMS)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument(
        "--span", type=float, default=12.0, help="seconds of a launch in which victims are killed"
    )
    parser.add_argument("--kept-span", type=float, default=2.0, help="the same on kept nodes")
    parser.add_argument("--victims", nargs="*", help="default: all in turn")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no draw later")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ[TOKEN] = secrets.token_hex(8)
    began_s = time.monotonic()
    draws: list[Draw] = []
    with cluster() if options.engine == "ray" else nullcontext() as started:
        for draw in _draw(Lottery(options.engine, started, options.seed), options):
            left = f"nothing left after {draw.left_s:.2f} s"
            result = draw.wrong or f"good after {draw.seconds:.2f} s, {left}"
            print(f"{time.monotonic() - began_s:6.1f} s  {draw.what}: {result}", flush=True)
            draws.append(draw)
            if time.monotonic() - began_s > options.seconds:
                break
    for kind in dict.fromkeys(draw.kind for draw in draws):
        of_kind = [draw for draw in draws if draw.kind == kind]
        good = [draw for draw in of_kind if not draw.wrong]
        num_early = sum(not draw.was_running for draw in of_kind)
        print(f"{kind}: {len(good)} of {len(of_kind)} good, {num_early} before the ranks ran", end="")
        for what, times in (
            ("error", [draw.seconds for draw in good]),
            ("nothing left", [draw.left_s for draw in good]),
        ):
            if times:
                print(f"; {what} after {statistics.median(times):.2f} s, at most {max(times):.2f} s", end="")
        print()
    bad = sum(bool(draw.wrong) for draw in draws)
    num_launches = sum(draw.num_launches for draw in draws)
    print(f"{len(draws) - bad} of {len(draws)} ended well; {num_launches} launches in between worked")
    sys.exit(bad > 0)


def _draw(lottery: Lottery, options: argparse.Namespace) -> Iterator[Draw]:
    spans = {False: options.span, True: options.kept_span}
    plan = _plan(options.victims or VICTIMS[lottery.engine])
    with lottery.kernel() if options.kills else nullcontext() as kernel:
        for victim, is_kept in itertools.islice(plan, options.kills):
            if victim == "kernel":
                yield lottery.kill_kernel(spans[is_kept], is_kept=is_kept)
            else:
                yield lottery.kill(kernel, victim, spans[is_kept], is_kept=is_kept)


def _plan(victims: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Yield victims, and whether to kill them on kept nodes, in an order in which few launches start all programs."""
    # The kernel keeps its nodes when a rank dies. A detached job can't use them.
    on_kept = itertools.cycle([one for one in victims if one not in ("rank", "job process")] or victims)
    while True:
        yield from ((one, False) for one in victims if one != "rank")
        if "rank" in victims:
            yield "rank", True
            yield "rank", True
        yield next(on_kept), True


if __name__ == "__main__":
    main()
