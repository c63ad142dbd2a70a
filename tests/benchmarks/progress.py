"""The cost of progress reports in a training loop: one step on the board, and a prepared loader compared with a plain
one.

Both are measured in a launched worker. The loaders yield the same ready-made batches, so the difference is the cost
that ``prepare`` adds to a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import monotonic
from typing import Any

from tests.benchmarks.bench import Row, alternate, at_most, call, kernel

NUM_STEPS = 20_000
MAX_US = 1.0
MAX_BUSY_US = 10.0


def measure() -> Iterator[Row]:
    with kernel() as started:
        result = call(started, in_kernel_measure)
    yield at_most("Slot.advance, a step", result["advance_us"], MAX_US, " us", 2)
    yield at_most("busy time of a step, measured", result["busy_us"], MAX_BUSY_US, " us", 2)
    added = result["prepared_us"] - result["plain_us"]
    note = f"{result['plain_us']:.2f} us plain, {result['prepared_us']:.2f} us prepared"
    yield Row("prepared loader, added to a step of a DataLoader", f"{added:.2f} us ({note})")


def in_kernel_measure() -> Any:
    from nblaunch import notebook_launcher

    return notebook_launcher(_measure, num_processes=1)


def _measure() -> dict[str, float]:
    import torch
    from torch.utils.data import DataLoader

    from nblaunch import Accelerator, context
    from nblaunch.progress.board_reports import BusyTime

    slot = context.current().slot
    accelerator = Accelerator()
    dataset = torch.arange(NUM_STEPS)
    prepared = accelerator.prepare(DataLoader(_Ready(dataset), batch_size=1, collate_fn=_first))
    plain = DataLoader(_Ready(dataset), batch_size=1, collate_fn=_first)

    def advance() -> None:
        for _ in range(NUM_STEPS):
            slot.advance(32)

    busy = BusyTime(slot)

    def measure_busy() -> None:
        for _ in range(NUM_STEPS):
            busy.end_backward(monotonic())

    def nothing() -> None:
        for _ in range(NUM_STEPS):
            pass

    steps = alternate(advance, nothing, 9)
    busy_times = alternate(measure_busy, nothing, 9)
    loops = alternate(lambda: _run(prepared), lambda: _run(plain), 9)
    return {
        "advance_us": (steps.a_s - steps.b_s) / NUM_STEPS * 1e6,
        "busy_us": (busy_times.a_s - busy_times.b_s) / NUM_STEPS * 1e6,
        "prepared_us": loops.a_s / NUM_STEPS * 1e6,
        "plain_us": loops.b_s / NUM_STEPS * 1e6,
    }


def _run(loader: Any) -> None:
    for _ in loader:
        pass


def _first(batch: list[Any]) -> Any:
    return batch[0]


class _Ready:
    """A dataset that returns the same tensor for each index."""

    def __init__(self, rows: Any) -> None:
        self._length = len(rows)
        self._batch = rows[:32].clone()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return self._batch
