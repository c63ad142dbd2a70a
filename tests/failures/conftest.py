"""Kernels in which launches fail, and common checks for every failure."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kernels import Cell, Kernel
from tests.thorough import thorough

START_METHODS = ("fork", "forkserver", "spawn")

PREAMBLE = """
import dataclasses, gc, os, psutil, resource, signal, socket, sys, threading, time
import torch
import torch.distributed as dist
import nblaunch
import nblaunch.start_methods.fork
from nblaunch import notebook_launcher

get_ipython().history_manager.enabled = False   # or a thread and a database would come to be at some time

def rank():
    return int(os.environ["RANK"])

def descriptors():
    return {int(fd): os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
            if os.path.exists(f"/proc/self/fd/{fd}")}

# Without eventfds: ipykernel opens one for each thread that prints, and closes it up to ten seconds after its end.
def traces():
    me = psutil.Process()
    return {
        "descriptors": [item for item in sorted(descriptors().items()) if not item[1].endswith("[eventfd]")],
        "native threads": me.num_threads(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "children": sorted(child.pid for child in me.children(recursive=True)),
        "listening": sorted(c.laddr.port for c in me.net_connections("inet") if c.status == psutil.CONN_LISTEN),
        "handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "mask": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "wakeup": signal.getitimer(signal.ITIMER_REAL),
        "environment": dict(os.environ),
        "streams": (sys.stdout, sys.stderr, sys.excepthook, sys.displayhook, __builtins__.input),
        "frozen": gc.get_freeze_count(),
        "folder": os.getcwd(),
        "memory files": sum("memfd:nblaunch" in line for line in open("/proc/self/maps")),
    }

def changed(before):
    def items(value):
        many = value.items() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        return set(map(str, many))
    after = traces()
    return {key: f"gone: {items(before[key]) - items(after[key])}, new: {items(after[key]) - items(before[key])}"
            for key in before if before[key] != after[key]
            and not (key == "native threads" and after[key] < before[key])}     # one was just ending before

def add_up():
    dist.init_process_group()
    total = torch.tensor(float(rank() + 1))
    dist.all_reduce(total)
    print("added up")
    return total.item()

def fill_disk():                                     # of 256 kB, by its log
    for _ in range(4000):
        print("x" * 100)

def relaunch(method="fork"):
    return notebook_launcher(add_up, num_processes=2, return_all=True, start_method=method)
"""

# Resources that are created once per process, such as torch's first store and ipykernel's socket for prints, exist
# before this.
SETTLED = """
print("settled", relaunch(), "x" * 100_000)      # long enough for the thread that zmq has for long messages
before = traces()
"""


def start_kernel(log_dir: Path, *, is_settled: bool = True, **env: str) -> Kernel:
    """Start a kernel and run the preamble in it.

    Args:
        log_dir: log folder of its jobs.
        is_settled: create the resources that exist once per process, so that ``traces()`` can be compared.
        **env: variables of the kernel.
    """
    kernel = Kernel.start(env={"NBLAUNCH_LOG_DIR": str(log_dir), **env})
    try:
        kernel.run(PREAMBLE)
        if not is_settled:
            return kernel
        kernel.run(SETTLED)
        kernel.run("1 / 0", raises="ZeroDivisionError")
        kernel.run(SETTLED)
    except BaseException:
        kernel.close(check=False)
        raise
    return kernel


def across_methods(
    argument: str, cases: Sequence[Any], forkserver: Collection[str] = (), spawn: Collection[str] = ()
) -> pytest.MarkDecorator:
    """Parametrize ``method`` and ``argument``: all cases with forks, and the named cases also in fresh interpreters.

    An interpreter per rank costs seconds, a fork milliseconds, and most failures are the same in both. So of the named
    cases, all except the first one are thorough.
    """
    named = {case.name: case for case in cases}
    pairs = [("fork", case) for case in cases]
    pairs += [("forkserver", named[name]) for name in forkserver]
    pairs += [("spawn", named[name]) for name in spawn]
    num_usual = len(cases) + 1
    values = [pytest.param(*pair, id=f"{pair[0]}-{pair[1].name}") for pair in pairs[:num_usual]]
    values += [thorough(*pair, id=f"{pair[0]}-{pair[1].name}") for pair in pairs[num_usual:]]
    return pytest.mark.parametrize(("method", argument), values)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Start the module's kernel, for all start methods. Every failure must leave it unchanged."""
    with start_kernel(tmp_path_factory.mktemp("logs")) as kernel:
        yield kernel


@pytest.fixture
def fresh(nothing_left_behind: None, tmp_path: Path) -> Iterator[Kernel]:
    """Start a separate kernel, for tests that change a kernel permanently."""
    with start_kernel(tmp_path / "logs") as kernel:
        yield kernel


@pytest.fixture
def start(nothing_left_behind: None, tmp_path: Path) -> Iterator[Callable[..., Kernel]]:
    """Return a function that starts kernels for the test to kill; their remains are ended in any case."""
    started: list[Kernel] = []

    def start_one(**options: Any) -> Kernel:
        started.append(start_kernel(tmp_path / "logs", **options))
        return started[-1]

    yield start_one
    for kernel in started:
        kernel.close(check=False)


def value_of(kernel: Kernel, expression: str) -> Any:
    """Return a literal that the kernel computes."""
    return ast.literal_eval(
        kernel.run(f"print(repr({expression}))", store_history=False).stdout.splitlines()[-1]
    )


def assert_as_before(kernel: Kernel) -> None:
    """Check that no process is left, nothing in the kernel has changed, and a launch works."""
    kernel.wait_for_no_processes()
    found = value_of(kernel, "(changed(before), relaunch(), nblaunch.last_job().status)")
    assert found == ({}, [3.0, 3.0], "done")


def source_line(cell: Cell) -> str:
    """Return the first source line that IPython marks in the cell's traceback, where a user looks first."""
    for line in cell.raised.lines:
        if line.lstrip("-").startswith("> "):
            return line.partition("> ")[2].strip().partition(" ")[2].strip()
    raise AssertionError(f"no source line is marked\n{cell.describe()}")
