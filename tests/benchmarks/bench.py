"""Shared code of the benchmarks: kernels to measure in, paired measurements, the printed table.

A benchmark is a module of this folder with ``measure()``, which yields rows. Most of its work happens inside a real
kernel: the kernel imports the same module and calls one of its ``in_kernel_...`` functions, whose value comes back as
JSON.

Single times on a shared machine mean little. Therefore benchmarks measure alternatives in turn in one process (A B A B)
and report the median of the ratios of neighbours.
"""

from __future__ import annotations

import ast
import gc
import json
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from tests.kernels import Kernel

ROOT = Path(__file__).resolve().parents[2]
CELL_TIMEOUT_S = 200.0


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Args:
        what: name of the measurement.
        value: the result, with its unit.
        target: the target, such as ``"<= 1.5"``; empty for a number that is only for comparison.
        holds: whether the result meets the target.
    """

    what: str
    value: str
    target: str = ""
    holds: bool = True


def at_most(what: str, value: float, limit: float, unit: str = "", digits: int = 2) -> Row:
    """Return a row whose value should not exceed ``limit``."""
    return Row(what, f"{value:.{digits}f}{unit}", f"<= {limit:g}{unit}", value <= limit)


def count(what: str, good: int, of: int, note: str = "") -> Row:
    """Return a row that counts successes; the target is all of them."""
    return Row(what, f"{good}/{of}{f' ({note})' if note else ''}", f"{of}/{of}", good == of)


def show(title: str, rows: Iterable[Row]) -> bool:
    """Print rows as one part of the table, each as soon as it is measured; return whether all targets were met."""
    print(f"\n## {title}\n\n| what | measured | target | |\n|---|---|---|---|")
    is_good = True
    for row in rows:
        verdict = ("ok" if row.holds else "MISSED") if row.target else ""
        print(f"| {row.what} | {row.value} | {row.target} | {verdict} |", flush=True)
        is_good = is_good and row.holds
    return is_good


@contextmanager
def kernel(
    setup: str = "import torch",
    env: Mapping[str, str] | None = None,
    *,
    check: bool = True,
    is_new: bool = True,
) -> Iterator[Kernel]:
    """Start a fresh kernel that can import the benchmarks, and run ``setup`` in it.

    Args:
        setup: code of a cell.
        env: variables to set.
        check: whether a process that outlives the kernel is an error.
        is_new: start a new interpreter, as every measurement needs; a rehearsal does not.
    """
    started = Kernel.start(cwd=ROOT, env=env, is_new=is_new)
    try:
        started.run(setup)
        yield started
    finally:
        started.close(check=check and sys.exc_info()[0] is None)


def call(started: Kernel, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function of a benchmark inside a kernel; arguments and value are plain data."""
    values = ", ".join(map(repr, args))
    module, name = function.__module__, function.__name__
    cell = started.run(
        f"import json, {module}\njson.dumps({module}.{name}({values}))", timeout_s=CELL_TIMEOUT_S
    )
    assert cell.result is not None, cell.describe()
    return json.loads(ast.literal_eval(cell.result))


def free_port() -> int:
    """Return a free port, for launchers that would all use the same default."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def sent_s(message: Mapping[str, Any]) -> float:
    """Return when a kernel sent a message, in seconds since the epoch."""
    date = message["header"]["date"]
    return (date if isinstance(date, datetime) else datetime.fromisoformat(date)).timestamp()


@dataclass(frozen=True)
class Pairs:
    """Times of two functions that ran in turn.

    Args:
        a_s: medians of the first, in seconds.
        b_s: medians of the second.
        ratio: the median of a / b over neighbours.
    """

    a_s: float
    b_s: float
    ratio: float


def alternate(a: Callable[[], object], b: Callable[[], object], num_pairs: int) -> Pairs:
    """Time ``a`` and ``b`` in turn, after one untimed call of each."""
    return pairs_of(partial(_seconds, a), partial(_seconds, b), num_pairs)


def pairs_of(a: Callable[[], float], b: Callable[[], float], num_pairs: int) -> Pairs:
    """Take two measurements in seconds, in turn; drop the first of each."""
    a(), b()
    times = [(a(), b()) for _ in range(num_pairs)]
    return Pairs(
        a_s=statistics.median(one for one, _ in times),
        b_s=statistics.median(other for _, other in times),
        ratio=statistics.median(one / other for one, other in times),
    )


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def count_calls(lap: Callable[[], object]) -> int:
    """Count the Python functions that a lap calls in this thread.

    The garbage collector is off meanwhile, because it may call functions at any time.
    """
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.disable()
    sys.setprofile(note)
    try:
        lap()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def batches(loader: Any, batch: Any, num_steps: int) -> Iterator[Any]:
    """Yield the inputs of ``num_steps`` steps from ``loader``; without a loader, repeat ``batch``."""
    if loader is None:
        for _ in range(num_steps):
            yield batch
        return
    for step, (inputs,) in enumerate(loader, 1):
        yield inputs
        if step == num_steps:
            return
