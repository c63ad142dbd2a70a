"""The cost of checks and recording in a step: jobs with both and jobs without one of them, in turn.

Two real ranks on gloo in launched workers, with one thread each, train the tiny model of ``step_overhead`` with a
loader. A job measures the processor time of many laps, of which the fastest is the least disturbed, and counts the
calls of Python functions in one more. The result is the median over all rounds of the ratio to a job of the same round
without checks and without recorded time spans and collectives.

The memory layout of a process changes the time of all its steps by several percent, so the times need many rounds.
Instruction counts do not vary like that: if Valgrind is installed, one more job of each kind counts them on rank 0.
"""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
from torch.utils.data import DataLoader

from tests.benchmarks import instructions
from tests.benchmarks.bench import ROOT, Row, at_most, count_calls
from tests.benchmarks.instructions import Lap
from tests.benchmarks.step_overhead import BATCH, _dataset, _model

NUM_RANKS, NUM_ROUNDS, NUM_LAPS, NUM_STEPS = 2, 5, 12, 200
NUM_WARM = 1100
"""Steps before the first lap: the checks have run, and run again at steps 2,048 and 4,096."""
MAX_SHARE = 1.0
TIMEOUT_S = 1800.0
KINDS = {"checks and recording": (True, True), "checks": (True, False), "recording": (False, True)}
"""Name of a variant -> whether checks and recording are on."""


def measure(rounds: int = NUM_ROUNDS) -> Iterator[Row]:
    if instructions.is_available():
        yield from _counted()
    yield from _timed(rounds)


def _counted() -> Iterator[Row]:
    bare = _instructions(has_checks=False, has_recording=False)
    yield Row("instructions of a step without checks and recording", f"{bare / 1e6:.2f} million")
    for what, (has_checks, has_recording) in KINDS.items():
        added = _instructions(has_checks=has_checks, has_recording=has_recording) - bare
        yield at_most(f"{what}: added instructions ({added:+,.0f})", 100 * added / bare, MAX_SHARE, " %")


def _timed(rounds: int) -> Iterator[Row]:
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
        yield at_most(
            f"{what}: added processor time ({calls[what]:+.1f} calls; {spread})", share, MAX_SHARE, " %"
        )


def _instructions(*, has_checks: bool, has_recording: bool) -> float:
    """Return the instructions of a step of rank 0, counted in a launch of its own."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-m", "tests.benchmarks.record_cost", "count", str(int(has_checks))]
        words = instructions.command(folder, [*words, str(int(has_recording)), folder])
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        ended = subprocess.run(
            words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    assert ended.returncode == 0, ended.stderr
    return float(ended.stdout.splitlines()[-1])


def _job(*, has_checks: bool, has_recording: bool, folder: str = "") -> dict[str, float]:
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
            _train, (folder,), num_processes=NUM_RANKS, backend="cpu", dashboard="none", hang_timeout_s=None
        )
    return measured


def _train(folder: str) -> dict[str, float]:
    """Return this rank's measures of a step: microseconds of processor time and calls, or instructions."""
    import nblaunch

    torch.set_num_threads(1)
    accelerator = nblaunch.Accelerator()
    module = _model()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.01))

    def lap_of(num_steps: int) -> Lap:
        loader = accelerator.prepare(DataLoader(_dataset(num_steps), batch_size=BATCH))

        def lap() -> None:
            for (inputs,) in loader:
                accelerator.backward(model(inputs).square().mean())
                optimizer.step()
                optimizer.zero_grad()

        return lap

    warm = lap_of(NUM_STEPS)
    for _ in range(-(-NUM_WARM // NUM_STEPS)):
        warm()
    gc.collect()
    gc.disable()
    if folder:
        return _counts(lap_of, Path(folder), is_counting=accelerator.is_main_process)
    return _times(warm, accelerator.wait_for_everyone)


def _counts(lap_of: Callable[[int], Lap], folder: Path, *, is_counting: bool) -> dict[str, float]:
    instructions.put_off_reports()
    if is_counting:
        return {"instructions": instructions.of_step(lap_of, folder)}
    for lap in [lap_of(instructions.SHORT), lap_of(instructions.LONG)] * (1 + instructions.NUM_COUNTED):
        lap()
    return {}


def _times(lap: Lap, meet: Callable[[], None]) -> dict[str, float]:
    laps_s = []
    for _ in range(NUM_LAPS):
        meet()
        began_s = time.process_time()
        lap()
        laps_s.append(time.process_time() - began_s)
    return {"us": min(laps_s) / NUM_STEPS * 1e6, "calls": count_calls(lap) / NUM_STEPS}


if __name__ == "__main__":
    if sys.argv[1:2] == ["count"]:
        checks, recording = (bool(int(word)) for word in sys.argv[2:4])
        print(_job(has_checks=checks, has_recording=recording, folder=sys.argv[4])["instructions"])
    else:
        for row in measure(*map(int, sys.argv[1:])):
            print(row, flush=True)
