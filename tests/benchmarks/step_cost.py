"""The cost of a training step on the host, compared with a plain loop: processor time, instructions and Python calls.

One process, one thread, on the CPU: the same tiny model takes the same steps with a plain loop, nblaunch and
Accelerate, on a fixed batch and with a loader, with and without ``accumulate``. The benchmark runs in a process without
a launcher, and in a launched worker, where only nblaunch's loop counts optimizer steps on the board.

All loops take turns in one process, and the result is the median of the differences to the plain lap of the same round.
On a busy machine, it grows nevertheless, because other processes evict data from the caches. Instruction counts do not
depend on other processes. If Valgrind is installed, it counts them; the difference between a long and a short lap gives
the count of a step.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader, TensorDataset, dataloader

from tests.benchmarks import instructions
from tests.benchmarks.bench import ROOT, Row, count_calls
from tests.benchmarks.instructions import LONG, NUM_COUNTED, SHORT, Lap

MAX_ADDED_US = 20.0
NUM_ROUNDS, NUM_STEPS = 60, 300
BATCH, WIDTH = 16, 32
COLUMNS = {
    "fixed batch": (False, False),
    "fixed batch, accumulate": (False, True),
    "loader": (True, False),
    "loader, accumulate": (True, True),
}
TIMEOUT_S = 1800.0

Measured = Mapping[
    str, Mapping[str, float]
]  # column -> loop's owner -> microseconds, instructions or calls per step


def measure() -> Iterator[Row]:
    for where in ("alone", "launched"):
        times, calls = _run(where, "times"), _run(where, "calls")
        counts = _run(where, "instructions") if instructions.is_available() else None
        for column in COLUMNS:
            for name in filter("plain".__ne__, times[column]):
                what = f"{name}, {column}{', in a worker' if where == 'launched' else ''}"
                yield _row(what, column, name, times, calls, counts)


def _row(what: str, column: str, name: str, times: Measured, calls: Measured, counts: Measured | None) -> Row:
    plain_us, added_us = times[column]["plain"], times[column][name]
    details = [f"{calls[column][name]:.0f} calls"]
    if counts is not None:
        added, plain = counts[column][name], counts[column]["plain"]
        details.append(f"{added / 1e3:.0f} of {(plain + added) / 1e3:.0f} thousand instructions")
    target = f"<= {MAX_ADDED_US:g} µs" if name == "nblaunch" else ""
    return Row(
        f"added to a step of a plain loop: {what}",
        f"{added_us:.1f} µs to {plain_us:.0f} µs ({', '.join(details)})",
        target,
        not target or added_us <= MAX_ADDED_US,
    )


def _run(where: str, what: str) -> Measured:
    """Measure in a separate process."""
    words = [sys.executable, "-m", "tests.benchmarks.step_cost", where, what]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        if what == "instructions":
            words = [*instructions.command(folder, words), folder]
        ended = subprocess.run(
            words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    assert ended.returncode == 0, ended.stderr
    measured: Measured = json.loads(ended.stdout.splitlines()[-1])
    return measured


# --- in the process that is measured ----------------------------------------------------------------------------------


def main(where: str, what: str, folder: str = "") -> None:
    measured: Any
    if where == "launched":
        from nblaunch import notebook_launcher

        measured = notebook_launcher(_measure, (what, folder, False), num_processes=1, dashboard="none")
    else:
        measured = _measure(what, folder, True)
    print(json.dumps(measured))


def _measure(what: str, folder: str, has_peer: bool) -> Measured:
    torch.set_num_threads(1)
    if what == "times":
        return _times(_loops(NUM_STEPS, has_peer))
    instructions.put_off_reports()
    count = (lambda lap: instructions.of_lap(lap, Path(folder))) if what == "instructions" else count_calls
    loops = [_loops(num_steps, has_peer) for num_steps in (SHORT, LONG)]
    # The first epoch searches for the loops around its line and keeps the result. Occasional events, such as signals,
    # add calls to other epochs; the smallest count is free of them.
    epochs = [
        [{key: count(lap) for key, lap in laps.items()} for laps in loops] for _ in range(1 + NUM_COUNTED)
    ][1:]
    short, long = (
        {key: min(each[key] for each in counts) for key in counts[0]} for counts in zip(*epochs, strict=True)
    )
    return _as_added({key: (long[key] - short[key]) / (LONG - SHORT) for key in short})


def _times(loops: Mapping[tuple[str, str], Lap]) -> Measured:
    laps: dict[tuple[str, str], list[float]] = {key: [] for key in loops}
    order = list(loops)
    gc.disable()
    for _ in range(NUM_ROUNDS):
        random.shuffle(order)
        for key in order:
            start_s = time.process_time()
            loops[key]()
            laps[key].append((time.process_time() - start_s) / NUM_STEPS * 1e6)
    return {
        column: {
            name: statistics.median(
                own - (0.0 if name == "plain" else plain)
                for own, plain in zip(laps[column, name], laps[column, "plain"], strict=True)
            )
            for name in _names(loops)
        }
        for column in COLUMNS
    }


def _as_added(found: Mapping[tuple[str, str], float]) -> Measured:
    return {
        column: {
            name: found[column, name] - (0.0 if name == "plain" else found[column, "plain"])
            for name in _names(found)
        }
        for column in COLUMNS
    }


def _names(found: Mapping[tuple[str, str], Any]) -> list[str]:
    return list(dict.fromkeys(name for _, name in found))


# --- the loops --------------------------------------------------------------------------------------------------------


def _loops(num_steps: int, has_peer: bool) -> dict[tuple[str, str], Lap]:
    """Return (column, owner) -> a function that runs a lap of this many steps, after a warm-up."""
    from nblaunch import Accelerator

    loops: dict[tuple[str, str], Lap] = {}
    for column, (has_loader, accumulates) in COLUMNS.items():
        loops[column, "plain"] = _without_hooks(_plain(num_steps, has_loader))
        loops[column, "nblaunch"] = _accelerated(Accelerator(), num_steps, has_loader, accumulates)
        if has_peer:
            loops[column, "Accelerate"] = _without_hooks(
                _accelerated(_peer(), num_steps, has_loader, accumulates)
            )
    for _ in range(3):
        for lap in loops.values():
            lap()
    return loops


def _peer() -> Any:
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def _without_hooks(lap: Lap) -> Lap:
    """Return a lap without the hooks that a worker has set on torch."""
    iterator: Any = dataloader._BaseDataLoaderIter
    hooks: list[Any] = [
        torch_optimizer._global_optimizer_pre_hooks,
        torch_optimizer._global_optimizer_post_hooks,
    ]

    def bare() -> None:
        before = [dict(one) for one in hooks]
        for one in hooks:
            one.clear()
        try:
            with (
                mock.patch.object(torch.autograd, "backward", inspect.unwrap(torch.autograd.backward)),
                mock.patch.object(iterator, "__next__", inspect.unwrap(iterator.__next__)),
            ):
                lap()
        finally:
            for one, were in zip(hooks, before, strict=True):
                one.update(were)

    return bare


def _parts(num_steps: int) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))
    dataset = TensorDataset(torch.randn(num_steps * BATCH, WIDTH))
    return model, torch.optim.SGD(model.parameters(), lr=0.01), DataLoader(dataset, batch_size=BATCH)


def _plain(num_steps: int, has_loader: bool) -> Lap:
    model, optimizer, loader = _parts(num_steps)
    source: Any = loader if has_loader else [[torch.randn(BATCH, WIDTH)]] * num_steps

    def lap() -> None:
        for (inputs,) in source:
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return lap


def _accelerated(accelerator: Any, num_steps: int, has_loader: bool, accumulates: bool) -> Lap:
    model, optimizer, loader = accelerator.prepare(*_parts(num_steps))
    source: Any = loader if has_loader else [[torch.randn(BATCH, WIDTH)]] * num_steps

    def lap() -> None:
        for (inputs,) in source:
            loss = model(inputs).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    def accumulating_lap() -> None:
        for (inputs,) in source:
            with accelerator.accumulate(model):
                loss = model(inputs).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return accumulating_lap if accumulates else lap


if __name__ == "__main__":
    main(*sys.argv[1:])
