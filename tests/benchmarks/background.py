"""Background jobs under bad conditions, counted: restarts beside running code, interrupts while they start.

    python -m tests.benchmarks.background [--restarts 50] [--interrupts 50]

* restart: a job fails once and starts its workers again while the kernel multiplies matrices in numpy, computes in
  torch, imports a module that the function imports, too, or has used (faked) CUDA. The kernel should go on, and the job
  end well.
* interrupt: at a random moment while a launch in the background starts. The cell should raise KeyboardInterrupt, with
  no process left, or hand out a job that runs.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.bench import ROOT, Row, count, show
from tests.kernels import Cell, Kernel, LeftBehind

_CELL_TIMEOUT_S = 60.0
_METHODS = ("fork", "forkserver", "spawn")

_SETUP = """
import os, pathlib, sys, time
import numpy, torch
import nblaunch, nblaunch.context
from nblaunch import backends, notebook_launcher

sys.path.insert(0, {folder!r})

def train(folder, module):
    if nblaunch.context.current().attempt == 0:
        while not pathlib.Path(folder, "busy").exists():
            time.sleep(0.002)
        raise ValueError("flaky")
    pathlib.Path(folder, "again").touch()
    if module:
        __import__(module)
    return os.getppid() != {pid}

def wait():
    time.sleep(3600)

kind = type(backends.discover()["cpu"])
before = kind.fork_hazard
"""

_LOADS = {
    "numpy": "a = numpy.random.rand(400, 400)\nwhile job.is_running:\n    a @ a",
    "torch": "a = torch.rand(300, 300, requires_grad=True)\nwhile job.is_running:\n    (a @ a).sum().backward()",
    "import": "__import__(module)",
    "cuda": "kind.fork_hazard = lambda backend: 'CUDA was used'\nwhile job.is_running:\n    time.sleep(0.001)",
}

_RESTART = """
kind.fork_hazard = before
module = {module!r}
args = {folder!r}, module
job = notebook_launcher(train, args, 2, background=True, max_restarts=1, return_all=True, dashboard="none")
pathlib.Path({folder!r}, "busy").touch()
{load}
assert job.result(40) == [True, True]
"""

_MODULE = """
import pathlib, time
while not pathlib.Path({folder!r}, "again").exists():
    time.sleep(0.002)
"""


def measure(restarts: int = 50, interrupts: int = 50) -> Iterator[Row]:
    yield count("a restart beside running code leaves kernel and job well", _restarts(restarts), restarts)
    yield count("an interrupted start leaves nothing, or a job", _interrupts(interrupts), interrupts)


def _restarts(of: int) -> int:
    good = 0
    with tempfile.TemporaryDirectory() as folder:
        started: Kernel | None = None
        for number in range(of):
            started = started or _start(folder)
            name = list(_LOADS)[number % len(_LOADS)]
            cell = started.submit(_restart_source(Path(folder), number, name))
            is_good = _wait(cell) and cell.error is None
            good += is_good
            if not is_good:
                print(f"a bad one, beside {name}:\n{cell.describe()}", file=sys.stderr)
                started.close(check=False)
                started = None
        if started is not None:
            started.close()
    return good


def _restart_source(folder: Path, number: int, name: str) -> str:
    own = folder / f"round{number}"
    own.mkdir()
    module = f"slow_module_{number}" if name == "import" else ""
    if module:
        (folder / f"{module}.py").write_text(_MODULE.format(folder=str(own)))
    return _RESTART.format(module=module, folder=str(own), load=_LOADS[name])


def _interrupts(of: int) -> int:
    good = 0
    with tempfile.TemporaryDirectory() as folder:
        started = _start(folder)
        for number in range(of):
            method = _METHODS[number % len(_METHODS)]
            is_good = _interrupt(started, method)
            good += is_good
        started.close(check=False)
    return good


def _interrupt(started: Kernel, method: str) -> bool:
    started.run("job = None")
    cell = started.submit(
        f"job = notebook_launcher(wait, (), 2, start_method={method!r}, background=True, dashboard='none')"
    )
    cell.wait_for(lambda cell: cell.contents("execute_input"), what="the cell to run")
    time.sleep(random.uniform(0.0, 0.08 if method == "fork" else 2.5))
    started.interrupt()
    if not _wait(cell):
        print(f"a bad one, by {method}:\n{cell.describe()}", file=sys.stderr)
        return False
    if cell.error is None:  # it came when the cell had ended
        started.run("job.cancel(); job.wait(30)")
        is_good = True
    else:
        ended = "last is None or not last.is_running"
        is_good = cell.error.name == "KeyboardInterrupt" and bool(
            started.run(f"last = nblaunch.last_job(); {ended}").value
        )
    try:
        started.wait_for_no_processes(5.0)
    except LeftBehind:
        is_good = False
    if not is_good:
        print(f"a bad one, by {method}:\n{cell.describe()}\n{started.processes()}", file=sys.stderr)
    return is_good


def _start(folder: str) -> Kernel:
    started = Kernel.start(cwd=ROOT, is_new=True)
    started.run(_SETUP.format(folder=folder, pid=started.pid))
    return started


def _wait(cell: Cell) -> bool:
    """Whether the cell ended in time; a kernel that hangs is given up."""
    try:
        cell.wait(_CELL_TIMEOUT_S)
    except AssertionError:
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("restarts", "interrupts"):
        parser.add_argument(f"--{name}", type=int, default=50)
    return not show("Background jobs", measure(**vars(parser.parse_args())))


if __name__ == "__main__":
    sys.exit(main())
