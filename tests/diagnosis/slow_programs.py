"""Training loops that are slow for a reason, and loops that run at full speed.

Each loop gets an Accelerator, runs on two ranks and trains until it is stopped.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import nblaunch

WIDTH = 256
MAX_S = 150.0
"""Seconds after which a loop ends by itself."""


class Slow(Dataset[torch.Tensor]):
    """A dataset whose samples take some time to read.

    Args:
        seconds: time to read a sample.
        size: number of elements of a sample.
    """

    def __init__(self, seconds: float, size: int = WIDTH) -> None:
        self._seconds = seconds
        self._sample = torch.ones(size)

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._seconds)
        return self._sample


def mlp(depth: int = 4, width: int = WIDTH) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())))


def loop(
    accelerator: Any,
    dataset: Any,
    model: nn.Module | None = None,
    *,
    batch_size: int = 8,
    optimizer: Callable[..., Any] = torch.optim.SGD,
    each_step: Callable[[int, nn.Module], object] = lambda step, model: None,
    **options: Any,
) -> None:
    """Train until all ranks are asked to stop."""
    model = model or mlp()
    steps = optimizer(model.parameters(), lr=1e-6)
    model, steps = accelerator.prepare(model, steps)
    # The loader is not prepared, because each rank has its own data.
    loader = DataLoader(dataset, batch_size=batch_size, **options)
    step, until_s = 0, time.monotonic() + MAX_S
    while True:
        for batch in loader:
            inputs = batch[0] if isinstance(batch, list) else batch
            accelerator.backward(model(inputs).square().mean())
            steps.step()
            steps.zero_grad()
            step += 1
            each_step(step, model)
            if accelerator.should_stop or time.monotonic() > until_s:
                return


def rows(number: int = 4096, *size: int) -> TensorDataset:
    return TensorDataset(torch.ones(number, *(size or (WIDTH,))))


# --- slow for a reason -----------------------------------------------------------------------------------------------


def data_on_all_ranks(accelerator: Any) -> None:
    loop(accelerator, Slow(4e-3))


def data_on_one_rank(accelerator: Any) -> None:
    loop(accelerator, Slow(6e-3 if accelerator.process_index == 1 else 0.0))


class Positions(nn.Module):
    """A model whose computing time grows with the length of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(6)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs)


def long_batches(accelerator: Any) -> None:
    length = 192 if accelerator.process_index == 1 else 64
    loop(accelerator, rows(512, length, WIDTH), Positions())


def shared_core(accelerator: Any) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[accelerator.process_index % len(cores)]})
    loop(accelerator, rows(), mlp(6), batch_size=128)


def many_threads(accelerator: Any) -> None:
    torch.set_num_threads(8)
    loop(accelerator, rows(1024, 1024), mlp(4, 1024), batch_size=256)


def saves(accelerator: Any) -> None:
    path = f"{os.environ['SLOW_FOLDER']}/{accelerator.process_index}.pt"
    state = torch.ones(8 << 20)
    loop(accelerator, rows(), each_step=lambda step, model: torch.save(state, path))


def garbage(accelerator: Any) -> None:
    gc.disable()
    kept = [[number] for number in range(400_000)]
    gc.enable()
    loop(accelerator, rows(), each_step=lambda step, model: gc.collect())
    del kept


def evaluations(accelerator: Any) -> None:
    held_out = DataLoader(rows(64 * 160), batch_size=64)

    def evaluate(step: int, model: nn.Module) -> None:
        if step % 4 == 0:
            model.eval()
            with torch.no_grad():
                for (batch,) in held_out:
                    model(batch)
            model.train()

    loop(accelerator, rows(), each_step=evaluate)


def collectives(accelerator: Any) -> None:
    def exchange(step: int, model: nn.Module) -> None:
        for _ in range(20):
            accelerator.reduce(torch.ones(1))

    loop(accelerator, rows(), each_step=exchange)


def optimizer(accelerator: Any) -> None:
    # Muon multiplies matrices of the parameters' size in bf16, several times in each step. CPUs without bf16 are slow.
    loop(accelerator, rows(1024, 384), nn.Linear(384, 384, bias=False), optimizer=torch.optim.Muon)


SLOW: dict[Callable[[Any], None], str] = {
    data_on_all_ranks: "of each step is spent waiting for data on all ranks (num_workers=0",
    data_on_one_rank: "rank 1 spends",
    long_batches: "batches on rank 1 are 3.0 times longer",
    shared_core: "rank 1 shares its core with",
    many_threads: " threads per process on",
    saves: "each step saves 3",
    garbage: "garbage collection takes",
    evaluations: "evaluation takes",
    collectives: " collectives, most of them all_",
    optimizer: "the optimizer takes",
}
"""Loop -> a part of the expected notice."""


# --- as fast as they can be -------------------------------------------------------------------------------------------


def plain(accelerator: Any) -> None:
    loop(accelerator, rows(), mlp(6), batch_size=128)


def with_workers(accelerator: Any) -> None:
    loop(accelerator, rows(), mlp(6), batch_size=128, num_workers=1)


def with_convolutions(accelerator: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten())
    loop(accelerator, rows(256, 3, 32, 32), model, batch_size=16)


def with_metrics(accelerator: Any) -> None:
    loop(
        accelerator, rows(), mlp(6), batch_size=128,
        each_step=lambda step, model: accelerator.gather(torch.ones(4)),
    )  # fmt: skip


def with_rare_work(accelerator: Any) -> None:
    held_out = DataLoader(rows(256), batch_size=128)
    path = f"{os.environ['SLOW_FOLDER']}/{accelerator.process_index}.pt"

    def now_and_then(step: int, model: nn.Module) -> None:
        if step % 100 == 0:
            with torch.no_grad():
                for (batch,) in held_out:
                    model(batch)
            torch.save(model.state_dict(), path)
            gc.collect()

    loop(accelerator, rows(), mlp(6), batch_size=128, each_step=now_and_then)


CLEAN: tuple[Callable[[Any], None], ...] = (
    plain, with_workers, with_convolutions, with_metrics, with_rare_work,
)  # fmt: skip


def run(function: Callable[[Any], None]) -> None:
    """Run a loop as the function of a launch."""
    function(nblaunch.Accelerator())
