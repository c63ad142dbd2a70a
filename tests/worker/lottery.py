"""Launches from used kernels: open files, compiled code, a debugger, Ray, a SIGALRM handler.

    python -m tests.worker.lottery [--draws 50] [--per-kernel 10] [--seed 0] [KIND ...]

* files: both ranks read records of a file, rows of a CSV file and arrays of an archive that the kernel has open. Every
  value must be right.
* compile: the kernel has compiled a function. Both ranks compile another one, and get the same results as without
  compiling.
* debugger: JupyterLab's debugger is attached. The function must run.
* ray: the kernel is connected to a cluster. Each rank runs a task in it; the kernel must survive.
* alarm: a SIGALRM handler raises at a random moment of a launch. The cell must raise that exception, or the launch
  complete; no process may be left, and the next launch must work.

The program prints every draw that ends otherwise, with the cell's output.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tests.kernels import Cell, Kernel

LAUNCH_TIMEOUT_S = 120.0

PREAMBLE = """
import csv, os, random, signal, time
import numpy as np, torch
from nblaunch import notebook_launcher

def launch(function, *args):
    return notebook_launcher(function, args, num_processes=2, backend="cpu", return_all=True, dashboard="none")
"""

FILES = """
with open("d.bin", "wb") as out:
    for i in range(5000):
        out.write(i.to_bytes(8, "little") * 8)
np.savez("x.npz", **{f"a{i}": np.full(300, i) for i in range(60)})
with open("rows.csv", "w", newline="") as out:
    csv.writer(out).writerows([i, i * i] for i in range(5000))
source, archive, text = open("d.bin", "rb"), np.load("x.npz"), open("rows.csv", newline="")
rows = csv.reader(text)
num_skipped = sum(1 for _, row in zip(range(7), rows))

def read(seed):
    draw = random.Random(seed * 10 + int(os.environ["RANK"]))
    wrong = 0
    for _ in range(5000):
        i = draw.randrange(5000)
        source.seek(i * 64)
        wrong += source.read(64) != i.to_bytes(8, "little") * 8
    for _ in range(60):
        i = draw.randrange(60)
        wrong += not (archive[f"a{i}"] == i).all()
    wrong += [int(row[1]) for row in rows] != [i * i for i in range(7, 5000)]
    return wrong
"""

COMPILE = """
@torch.compile
def warm(x):
    return (x * 2 + 1).relu().sum()
warm(torch.ones(64))

def compiled(number):
    @torch.compile
    def f(x):
        return (x * number).sin().sum() + number
    x = torch.arange(256.0)
    return torch.allclose(f(x), (x * number).sin().sum() + number, atol=1e-3)
"""

RAY = """
import ray
for attempt in range(3):  # Ray gives its raylet 30 s, which a busy machine may need
    try:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error",
                 _system_config={"worker_niceness": 0})  # else its workers wait for all else that the machine does
        break
    except Exception as error:
        print(error)
        ray.shutdown()

@ray.remote(num_cpus=0)
def add(a, b):
    return a + b

def ask(number):
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level="error")
    return ray.get(add.remote(number, int(os.environ["RANK"])), timeout=60)
"""

ALARM = """
class CellTooLong(Exception):
    pass

def give_up(number, frame):
    raise CellTooLong

signal.signal(signal.SIGALRM, give_up)

def wait():
    time.sleep(0.02)
    return 1

def limited(seconds):
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return launch(wait)
    except CellTooLong:
        return "too long"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
"""


@dataclass(frozen=True)
class Kind:
    """A use of a kernel.

    Args:
        cell: prepares the kernel.
        call: an expression that launches; ``{number}`` is the number of the draw, ``{moment}`` a random moment.
        is_right: whether the value of the call is right for a number.
        has_debugger: whether a debugger is attached.
    """

    cell: str
    call: str
    is_right: Callable[[object, int], bool]
    has_debugger: bool = False


KINDS = {
    "files": Kind(FILES, "launch(read, {number})", lambda value, number: value == [0, 0]),
    "compile": Kind(COMPILE, "launch(compiled, {number})", lambda value, number: value == [True, True]),
    "debugger": Kind(
        "def run(number): return number",
        "launch(run, {number})",
        lambda value, number: value == [number, number],
        has_debugger=True,
    ),
    "ray": Kind(RAY, "launch(ask, {number})", lambda value, number: value == [number, number + 1]),
    "alarm": Kind(ALARM, "limited({moment})", lambda value, number: value in ([1, 1], "too long")),
}
MAX_MOMENT_S = 0.25


@contextmanager
def prepared(kind: Kind) -> Iterator[Kernel]:
    with tempfile.TemporaryDirectory() as folder, Kernel.start(cwd=folder) as kernel:
        kernel.run(PREAMBLE + kind.cell, timeout_s=LAUNCH_TIMEOUT_S)
        if kind.has_debugger:
            kernel.start_debugger()
        yield kernel


def draw(kernel: Kernel, name: str, number: int, moment_s: float) -> str:
    """Launch once; return what is wrong, or an empty string."""
    kind = KINDS[name]
    cell: Cell = kernel.submit(kind.call.format(number=number, moment=moment_s)).wait(LAUNCH_TIMEOUT_S)
    if cell.error is not None:
        return f"{cell.error.name}: {cell.error.value}"
    if not kind.is_right(cell.value, number):
        return f"value {cell.value!r}"
    if name == "alarm":
        left = kernel.run("import psutil\n[one.cmdline() for one in psutil.Process().children()]").value
        if left:
            return f"processes are left: {left}"
        if (value := kernel.run("launch(wait)").value) != [1, 1]:
            return f"the next launch returned {value!r}"
    return ""


def main() -> None:
    """Draw as often as the arguments say; print each bad draw, and counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*", default=list(KINDS), metavar="KIND")
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--per-kernel", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    moments = random.Random(options.seed)
    num_bad = 0
    for name in options.kinds:
        wrong = []
        for first in range(0, options.draws, options.per_kernel):
            with prepared(KINDS[name]) as kernel:
                for number in range(first, min(first + options.per_kernel, options.draws)):
                    if text := draw(kernel, name, number, moments.uniform(0.001, MAX_MOMENT_S)):
                        wrong.append(text)
                        print(f"{name} {number}: {text}", flush=True)
        print(f"{name}: {options.draws - len(wrong)} of {options.draws} ended well", flush=True)
        num_bad += len(wrong)
    sys.exit(num_bad > 0)


if __name__ == "__main__":
    main()
