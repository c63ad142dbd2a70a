"""The cost of printing for a worker, the number of messages to the notebook, and whether lines are lost."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.bench import CELL_TIMEOUT_S, Row, at_most, call, count, free_port, kernel
from tests.kernels import Cell

NUM_WORKERS = 4
NUM_PRINTS = {"nblaunch": 10_000, "accelerate": 200}  # fewer, because its prints take milliseconds
MAX_US = 30


def measure() -> Iterator[Row]:
    for launcher, env in (("nblaunch", {}), ("accelerate", {"ACCELERATE_USE_CPU": "true"})):
        num_prints = NUM_PRINTS[launcher]
        total = NUM_WORKERS * num_prints
        what = f"{launcher}, {NUM_WORKERS} workers x {num_prints:,} prints"
        with tempfile.TemporaryDirectory() as folder, kernel(env=env) as started:
            source = (
                f"from tests.benchmarks import output\noutput.in_kernel_{launcher}({folder!r}, {num_prints})"
            )
            cell = started.submit(source).wait(CELL_TIMEOUT_S)
            assert cell.error is None, cell.describe()
            cost_us = statistics.median(float(file.read_text()) for file in Path(folder).iterdir())
            if launcher == "nblaunch":
                yield at_most(f"{what}: a print", cost_us, MAX_US, " us", 1)
                yield count(f"{what}: lines in the logs", call(started, in_kernel_logged_lines), total)
            else:
                yield Row(f"{what}: a print", f"{cost_us:.1f} us")
                yield Row(f"{what}: whole lines in the cell", f"{_num_whole(cell, num_prints)}/{total}")
            yield Row(f"{what}: messages to the notebook", _messages(cell))


def _num_whole(cell: Cell, num_prints: int) -> int:
    wanted = {_line(i) for i in range(num_prints)}
    return sum(line in wanted for line in cell.stdout.splitlines())


def _messages(cell: Cell) -> str:
    shown = [m for m in cell.messages if m["msg_type"] in ("stream", "display_data", "update_display_data")]
    size = sum(len(str(message["content"])) for message in shown)
    return (
        f"{len(shown)} in {cell.elapsed_s:.1f} s ({len(shown) / cell.elapsed_s:.0f}/s, {size / 1e6:.2f} MB)"
    )


def in_kernel_nblaunch(folder: str, num_prints: int) -> None:
    from nblaunch import notebook_launcher

    notebook_launcher(_print, (folder, num_prints), num_processes=NUM_WORKERS)


def in_kernel_accelerate(folder: str, num_prints: int) -> None:
    from accelerate import notebook_launcher

    notebook_launcher(_print, (folder, num_prints), num_processes=NUM_WORKERS, use_port=str(free_port()))


def in_kernel_logged_lines() -> int:
    """Return the number of the last job's lines that are complete and in order."""
    import nblaunch

    job = nblaunch.last_job()
    assert job is not None
    good = 0
    for rank in range(NUM_WORKERS):
        wanted = [_line(i) for i in range(NUM_PRINTS["nblaunch"])]
        good += sum(line == right for line, right in zip(job.logs(rank).splitlines(), wanted, strict=False))
    return good


def _line(i: int) -> str:
    return f"line {i}: loss 0.693147, accuracy 0.5000, learning rate 1e-3"


def _print(folder: str, num_prints: int) -> None:
    import os
    import time

    start = time.perf_counter()
    for i in range(num_prints):
        print(_line(i))
    cost_us = (time.perf_counter() - start) / num_prints * 1e6
    Path(folder, os.environ["RANK"]).write_text(repr(cost_us))
