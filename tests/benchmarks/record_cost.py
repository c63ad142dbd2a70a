"""The cost of checks and recording in a step: jobs with both and jobs without one of them, in turn.

Two real ranks on gloo in launched workers, with one thread each, train the tiny model of ``step_overhead`` with a
loader. A job measures the processor time of many laps, of which the fastest is the least disturbed, and counts the
calls of Python functions in one more. The result is the median over all rounds of the ratio to a job of the same round
without checks and without recorded time spans and collectives.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch.utils.data import DataLoader

from tests.benchmarks.bench import Row, at_most
from tests.benchmarks.step_overhead import BATCH, _dataset, _model

NUM_RANKS, NUM_ROUNDS, NUM_LAPS, NUM_STEPS = 2, 5, 12, 200
NUM_WARM = 1100
"""Steps before the first lap: the checks have run, and run again at steps 2,048 and 4,096."""
MAX_SHARE = 1.0
KINDS = {"checks and recording": (True, True), "checks": (True, False), "recording": (False, True)}
"""Name of a variant -> whether checks and recording are on."""


def measure(rounds: int = NUM_ROUNDS) -> Iterator[Row]:
    ratios: dict[str, list[float]] = {what: [] for what in KINDS}
    calls: dict[str, float] = {}
    bare_us = []
    for _ in range(rounds):
        bare = _job(has_checks=False, has_recording=False)
        bare_us.append(bare["us"])
        for what, (has_checks, has_recording) in KINDS.items():
            job = _job(has_checks=has_checks, has_recording=has_recording)
            ratios[what].append(job["us"] / bare["us"])
            calls[what] = job["calls"] - bare["calls"]
    yield Row("processor time of a step without checks and recording", f"{statistics.median(bare_us):.0f} µs")
    for what, each in ratios.items():
        share = 100 * (statistics.median(each) - 1)
        spread = f"{100 * (min(each) - 1):+.1f} to {100 * (max(each) - 1):+.1f} %"
        yield at_most(f"{what}: added to it ({calls[what]:+.1f} calls; {spread})", share, MAX_SHARE, " %")


def _job(*, has_checks: bool, has_recording: bool) -> dict[str, float]:
    from nblaunch import notebook_launcher
    from nblaunch.wire.board import Slot
    from nblaunch.worker import collective_hooks

    with ExitStack() as changed:
        setting = {"NBLAUNCH_CHECKS": ""} if has_checks else {"NBLAUNCH_CHECKS": "off"}
        changed.enter_context(mock.patch.dict(os.environ, setting))
        if not has_recording:  # forked workers inherit this process's variables
            changed.enter_context(mock.patch.object(Slot, "record_spans"))
            changed.enter_context(mock.patch.object(collective_hooks, "record_collectives", return_value=int))
        measured: dict[str, float] = notebook_launcher(
            _train, num_processes=NUM_RANKS, backend="cpu", dashboard="none"
        )
    return measured


def _train() -> dict[str, float]:
    """Return this rank's processor time per step in microseconds, and its calls per step."""
    import nblaunch

    torch.set_num_threads(1)
    accelerator = nblaunch.Accelerator()
    module = _model()
    model, optimizer, loader = accelerator.prepare(
        module,
        torch.optim.SGD(module.parameters(), lr=0.01),
        DataLoader(_dataset(NUM_STEPS), batch_size=BATCH),
    )

    def lap() -> None:
        for (inputs,) in loader:
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(-(-NUM_WARM // NUM_STEPS)):
        lap()
    gc.collect()
    gc.disable()
    laps_s = []
    for _ in range(NUM_LAPS):
        accelerator.wait_for_everyone()
        began_s = time.process_time()
        lap()
        laps_s.append(time.process_time() - began_s)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        lap()
    finally:
        sys.setprofile(None)
    return {"us": min(laps_s) / NUM_STEPS * 1e6, "calls": calls / NUM_STEPS}


if __name__ == "__main__":
    for row in measure(*map(int, sys.argv[1:])):
        print(row, flush=True)
