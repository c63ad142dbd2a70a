"""Messages and costs of dashboards: 8 workers that print and step, shown by each kind of dashboard.

    python -m tests.benchmarks dashboards [--seconds 30] [--only widgets]

There are two loads: "flat out", where a step only prints, and "training", where a step computes for 2 ms and waits 8 ms
for a device, and one step in 20 prints. Each dashboard and no dashboard are measured in turn in one kernel; speeds are
ratios of neighbours. Then they are measured with a front end that requests the cell and reads none of its messages.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.bench import CELL_TIMEOUT_S, Row, at_most, kernel, sent_s
from tests.dashboard.feed import FEED
from tests.kernels import Cell, Kernel

NUM_WORKERS = 8
SECONDS = 30.0  # for each load and dashboard, over all rounds
NUM_ROUNDS = 3
MAX_UPDATES_S, MAX_MESSAGES_S, MAX_KB_S, MAX_KERNEL_PERCENT = 10, 20, 25, 3
MAX_SLOWER, MAX_UNREAD = 1.01, 1.1
MAX_EMPTY_MS = 1.5
LOADS = ("flat out", "training")
_EMPTY_JOB = """
def empty_job():
    begun = time.perf_counter()
    d = dashboard.choose(); emit(d, begin(2)); look(d, [SlotReading(0), SlotReading(1)]); emit(d, end(2)); close(d)
    return time.perf_counter() - begun
min(empty_job() for _ in range(10))
"""

_FOLDED = "more lines"
"""Text in the output that holds the workers' lines after the first ones."""

_SAME_UPDATE_S = 0.03
"""Messages within this time are one update of several widgets, or of table and lines."""


@dataclass(frozen=True)
class Lap:
    """One launch.

    Args:
        steps_s: steps of all ranks per second.
        kernel_share: the kernel process's share of one core.
        updates_s: visible updates per second.
        messages_s: messages per second for tables, widgets and lines, except messages that open and close widgets.
        board_kb_s: kB per second for tables and widgets, except for opening and closing them.
        lines_kb_s: kB per second for lines that workers print.
        opening: messages that open widgets or the table.
    """

    steps_s: float
    kernel_share: float
    updates_s: float
    messages_s: float
    board_kb_s: float
    lines_kb_s: float
    opening: int


def measure(seconds: float = SECONDS, only: str = "") -> Iterator[Row]:
    """Measure all dashboards, or ``only`` one."""
    from nblaunch.dashboard import KINDS

    kinds = [only] if only else [kind for kind in KINDS if kind not in ("auto", "none")]
    with kernel(FEED) as started:
        empty_s = float(str(started.run(_EMPTY_JOB).result))
        yield at_most("auto, a job that does nothing", empty_s * 1e3, MAX_EMPTY_MS, " ms")
    for load in LOADS:
        with kernel("import torch\nfrom tests.benchmarks import dashboards") as started:
            _run(started, "none", load, 1.0)  # warms up
            for kind in kinds:
                yield from _rows(started, kind, load, seconds / NUM_ROUNDS)
    with kernel("import torch\nfrom tests.benchmarks import dashboards") as started:
        for kind in kinds:
            yield _unread(started, kind, seconds / NUM_ROUNDS)


def _rows(started: Kernel, kind: str, load: str, seconds: float) -> Iterator[Row]:
    pairs = [
        (_run(started, kind, load, seconds), _run(started, "none", load, seconds)) for _ in range(NUM_ROUNDS)
    ]
    shown, bare = [one for one, _ in pairs], [other for _, other in pairs]
    what = f"{kind}, {load}"
    yield at_most(f"{what}: updates a second", _median(shown, "updates_s"), MAX_UPDATES_S, digits=1)
    yield at_most(f"{what}: messages a second", _median(shown, "messages_s"), MAX_MESSAGES_S, digits=1)
    note = (
        f"{_median(shown, 'lines_kb_s'):.1f} kB/s of lines, {_median(shown, 'opening'):.0f} messages to open"
    )
    row = at_most(f"{what}: kB a second", _median(shown, "board_kb_s"), MAX_KB_S, digits=1)
    yield Row(row.what, f"{row.value} ({note})", row.target, row.holds)
    without = _median(bare, "kernel_share")
    # Reading the workers' output is not part of the display, and takes longer the more they print.
    added = statistics.median(
        one.kernel_share - other.kernel_share * one.steps_s / other.steps_s for one, other in pairs
    )
    row = at_most(f"{what}: added share of a core, kernel", 100 * added, MAX_KERNEL_PERCENT, "%", 1)
    yield Row(row.what, f"{row.value} ({100 * without:.1f}% without)", row.target, row.holds)
    slower = statistics.median(other.steps_s / one.steps_s for one, other in pairs)
    if load == "training":
        yield at_most(f"{what}: times slower than without", slower, MAX_SLOWER, digits=3)
    else:  # workers and kernel compete for the cores, and the cost of a print depends on the disk
        yield Row(f"{what}: times slower than without", f"{slower:.3f}")


def _unread(started: Kernel, kind: str, seconds: float) -> Row:
    """Measure with a front end that reads nothing; it must not slow anything down."""
    pairs = [
        (_run(started, kind, "flat out", seconds, reads=False), _run(started, kind, "flat out", seconds))
        for _ in range(NUM_ROUNDS)
    ]
    slower = statistics.median(other.steps_s / one.steps_s for one, other in pairs)
    return at_most(f"{kind}, flat out: times slower if no front end reads", slower, MAX_UNREAD, digits=3)


def _median(laps: list[Lap], name: str) -> float:
    return statistics.median(getattr(lap, name) for lap in laps)


def _run(started: Kernel, kind: str, load: str, seconds: float, *, reads: bool = True) -> Lap:
    # Simulate a user, because widgets are shown only if a user can see them.
    cell = started.submit(f"dashboards.in_kernel_run({kind!r}, {load!r}, {seconds})", allow_stdin=True)
    if not reads:
        time.sleep(seconds)
    cell.wait(CELL_TIMEOUT_S)
    assert cell.error is None, cell.describe()
    measured = json.loads(str(cell.result).strip("'"))
    return _lap(cell, measured["steps_s"], measured["share"], measured["wall_s"])


def _lap(cell: Cell, steps_s: float, share: float, wall_s: float) -> Lap:
    board = _messages(cell, "display_data", "update_display_data", "comm_msg")
    folded = [message for message in board if _FOLDED in json.dumps(message["content"])]
    board = [message for message in board if message not in folded]
    lines = [*_messages(cell, "stream"), *folded]
    return Lap(
        steps_s,
        share,
        updates_s=_num_updates([*board, *lines]) / wall_s,
        messages_s=len([*board, *lines]) / wall_s,
        board_kb_s=sum(map(_size, board)) / 1000 / wall_s,
        lines_kb_s=sum(map(_size, lines)) / 1000 / wall_s,
        opening=len(_messages(cell, "comm_open", "display_data")),
    )


def _messages(cell: Cell, *kinds: str) -> list[dict[str, Any]]:
    return [message for message in cell.messages if message["msg_type"] in kinds]


def _size(message: dict[str, Any]) -> int:
    return sum(len(json.dumps(message[part], default=str)) for part in ("header", "parent_header", "content"))


def _num_updates(messages: Sequence[dict[str, Any]]) -> int:
    times = sorted(sent_s(message) for message in messages)
    return sum(later - earlier > _SAME_UPDATE_S for earlier, later in zip([0.0, *times], times, strict=False))


def in_kernel_run(kind: str, load: str, seconds: float) -> str:
    """Launch, and return all ranks' steps per second and this process's share of a core."""
    from nblaunch import notebook_launcher

    wall_s, cpu_s = time.monotonic(), time.process_time()
    rates = notebook_launcher(
        _train,
        (load, seconds),
        num_processes=NUM_WORKERS,
        backend="cpu",
        threads_per_process=1,
        dashboard=kind,
        return_all=True,
    )
    wall_s, cpu_s = time.monotonic() - wall_s, time.process_time() - cpu_s
    return json.dumps({"steps_s": sum(rates), "share": cpu_s / wall_s, "wall_s": wall_s})


def _train(load: str, seconds: float) -> float:
    """Return this rank's steps per second."""
    from nblaunch import Accelerator

    accelerator = Accelerator()
    accelerator.wait_for_everyone()
    begun = time.monotonic()
    step = 0
    for step in accelerator.progress(range(10**9)):
        if load == "training":
            _compute(0.002)
            time.sleep(0.008)
        if load == "flat out" or step % 20 == 0:
            print(f"step {step}: loss 0.693147, learning rate 1e-3")
        if time.monotonic() - begun >= seconds:
            break
    return (step + 1) / (time.monotonic() - begun)


def _compute(cpu_s: float) -> None:
    """Use this much processor time."""
    until = time.thread_time() + cpu_s
    while time.thread_time() < until:
        sum(range(200))
