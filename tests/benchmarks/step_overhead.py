"""The cost of a training step compared with raw DistributedDataParallel, of a prepared loader, and of ``prepare``.

Two real ranks use gloo and one thread each. In each of several processes, the same tiny model takes the same steps with
raw DDP, nblaunch and Accelerate, in turn and after a barrier each time; the result is the median over all rounds of the
ratio to the raw run of the same round.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.benchmarks.bench import Row, at_most, batches
from tests.training import ranks

NUM_RANKS, NUM_ROUNDS, NUM_STEPS = 2, 5, 600
BATCH, WIDTH = 16, 32
MAX_WALL, MAX_CPU, MIN_LOADER, MAX_PREPARE = 1.05, 1.08, 0.97, 1.1
BERT_BASE = {"vocabulary": 30_522, "width": 768, "layers": 12, "heads": 12}

Lap = tuple[float, float]  # seconds of the clock, seconds of CPU time


def measure() -> Iterator[Row]:
    ranks.start_server()
    try:
        for has_loader in (False, True):
            laps = ranks.run(_steps, NUM_RANKS, has_loader, timeout_s=300)
            yield from _step_rows("steps with a loader" if has_loader else "steps on a fixed batch", laps)
        ratios = ranks.run(_loaders, NUM_RANKS, timeout_s=300)
        ratio = statistics.median(ratios)
        yield Row(
            "throughput of a prepared loader over DataLoader + DistributedSampler",
            f"{ratio:.3f}", f">= {MIN_LOADER}", ratio >= MIN_LOADER,
        )  # fmt: skip
        prepared = ranks.run(_prepares, NUM_RANKS, timeout_s=300)
        ratio = statistics.median(one for one, _ in prepared)
        yield at_most(
            f"prepare of a BERT-base-sized model over DDP's construction ({prepared[0][1] * 1e3:.0f} ms)",
            ratio, MAX_PREPARE,
        )  # fmt: skip
    finally:
        ranks.stop_server()


def _step_rows(what: str, answers: list[dict[str, list[Lap]]]) -> Iterator[Row]:
    raw = [lap for laps in answers for lap in laps["raw DDP"]]
    yield Row(f"{what}, raw DDP", f"{statistics.median(wall for wall, _ in raw) / NUM_STEPS * 1e6:.0f} µs")
    for name in ("nblaunch", "accelerate"):
        for index, (unit, limit) in enumerate((("wall time", MAX_WALL), ("CPU time", MAX_CPU))):
            ratio = statistics.median(
                mine[index] / theirs[index]
                for laps in answers
                for mine, theirs in zip(laps[name], laps["raw DDP"], strict=True)
            )
            if name == "nblaunch":
                yield at_most(f"{what}, nblaunch: {unit} over raw DDP", ratio, limit, digits=3)
            else:
                yield Row(f"{what}, {name}: {unit} over raw DDP", f"{ratio:.3f}")


# --- in a rank -------------------------------------------------------------------------------------------------------


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))


def _dataset(num_steps: int) -> TensorDataset:
    return TensorDataset(torch.randn(num_steps * BATCH * NUM_RANKS, WIDTH))


def _steps(has_loader: bool) -> dict[str, list[Lap]]:
    """Return the laps of each kind of loop, by rounds."""
    from nblaunch import Accelerator

    first = Accelerator()  # joins the process group that all loops use
    runs = {
        "raw DDP": _raw_run(has_loader),
        "nblaunch": _accelerated_run(first, has_loader),
        "accelerate": _accelerated_run(_reference(), has_loader),
    }
    for run in runs.values():
        run(50)
    laps: dict[str, list[Lap]] = {name: [] for name in runs}
    for round_number in range(NUM_ROUNDS):
        names = list(runs)[round_number % 3 :] + list(runs)[: round_number % 3]  # take turns in being first
        for name in names:
            laps[name].append(_lap(first, lambda: runs[name](NUM_STEPS)))  # noqa: B023
    return laps


def _reference() -> Any:
    os.environ.update(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    from accelerate import Accelerator

    return Accelerator(cpu=True)


def _raw_run(has_loader: bool) -> Callable[[int], None]:
    model = DistributedDataParallel(_model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(BATCH, WIDTH)
    dataset = _dataset(NUM_STEPS)
    loader = DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset, shuffle=False))

    def run(num_steps: int) -> None:
        for inputs in batches(loader if has_loader else None, batch, num_steps):
            loss = model(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return run


def _accelerated_run(accelerator: Any, has_loader: bool) -> Callable[[int], None]:
    module = _model()
    model, optimizer, loader = accelerator.prepare(
        module,
        torch.optim.SGD(module.parameters(), lr=0.01),
        DataLoader(_dataset(NUM_STEPS), batch_size=BATCH),
    )
    batch = torch.randn(BATCH, WIDTH)

    def run(num_steps: int) -> None:
        for inputs in batches(loader if has_loader else None, batch, num_steps):
            loss = model(inputs).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    return run


def _lap(accelerator: Any, function: Callable[[], object]) -> Lap:
    """Time ``function``, which all ranks begin together; otherwise the time would include their garbage collections."""
    gc.collect()
    gc.disable()
    try:
        accelerator.wait_for_everyone()
        cpu, wall = time.process_time(), time.perf_counter()
        function()
        return time.perf_counter() - wall, time.process_time() - cpu
    finally:
        gc.enable()


def _loaders() -> float:
    """Return the ratio of batches per second of a prepared and a plain loader, as the median over rounds."""
    from nblaunch import Accelerator

    accelerator = Accelerator()
    dataset = _dataset(4000)
    plain = DataLoader(dataset, batch_size=BATCH, sampler=DistributedSampler(dataset))
    prepared = accelerator.prepare(DataLoader(dataset, batch_size=BATCH, shuffle=True))
    ratios = []
    for _ in range(2 * NUM_ROUNDS):
        theirs = _lap(accelerator, lambda: [None for _ in plain])[0]
        ratios.append(theirs / _lap(accelerator, lambda: [None for _ in prepared])[0])
    return statistics.median(ratios)


class _BertSized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width, heads = BERT_BASE["width"], BERT_BASE["heads"]
        self.embedding = nn.Embedding(BERT_BASE["vocabulary"], width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width) for _ in range(BERT_BASE["layers"])
        )


def _prepares() -> tuple[float, float]:
    """Return the ratio of the times of ``prepare`` and DDP's constructor, as the median over rounds, and the
    constructor's seconds.
    """
    from nblaunch import Accelerator

    accelerator = Accelerator()
    model = _BertSized()
    ratios, bare = [], []
    for _ in range(NUM_ROUNDS + 1):
        theirs = _lap(accelerator, lambda: DistributedDataParallel(model))[0]
        ours = _lap(accelerator, lambda: accelerator.prepare(model))[0]
        accelerator.free_memory()
        ratios.append(ours / theirs)
        bare.append(theirs)
    return statistics.median(ratios[1:]), statistics.median(bare[1:])
