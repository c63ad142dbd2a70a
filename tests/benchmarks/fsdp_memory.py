"""Host memory of a sharded launch: the kernel builds a model once, and every rank holds a part.

The benchmark measures the proportional set size (PSS, see ``memory.py``) of the kernel and its workers together. At
every stage, it subtracts the memory of the same launch with a tiny model: interpreters, libraries, process groups. The
peak during sharding is the largest of as many samples as the machine allows.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.benchmarks.bench import CELL_TIMEOUT_S, Row, at_most, kernel
from tests.benchmarks.memory import total_pss_mb
from tests.kernels import Kernel

NUM_WORKERS = 8
MODEL_MB = 1024
STAGES = ("built", "sharded", "trained")
_CELL = "from tests.benchmarks import fsdp_memory\nfsdp_memory.in_kernel_shard({mb}, {device!r}, {folder!r}, {workers})"


def measure() -> Iterator[Row]:
    where = f"{NUM_WORKERS} workers, {MODEL_MB} MB model"
    floor = stages_mb(0, "cpu")
    found = stages_mb(MODEL_MB, "cpu")
    above = {stage: found[stage] - floor[stage] for stage in found}
    yield at_most(f"{where}: before it is sharded", above["built"], 1.3 * MODEL_MB, " MB", 0)
    yield at_most(f"{where}: peak while it is sharded", above["peak"], 1.3 * MODEL_MB, " MB", 0)
    yield at_most(f"{where}: sharded", above["sharded"], 1.05 * MODEL_MB, " MB", 0)
    yield at_most(
        f"{where}: after a step of SGD (kernel's model, parts)", above["trained"], 2.3 * MODEL_MB, " MB", 0
    )
    found = stages_mb(MODEL_MB, "meta")
    above = {stage: found[stage] - floor[stage] for stage in found}
    yield at_most(f"{where} on the meta device: sharded", above["sharded"], 1.05 * MODEL_MB, " MB", 0)


def stages_mb(model_mb: int, device: str, num_workers: int = NUM_WORKERS) -> dict[str, float]:
    """Return the PSS of the whole launch at every stage, and the peak before the second stage."""
    with tempfile.TemporaryDirectory() as folder, kernel() as started:
        cell = started.submit(_CELL.format(mb=model_mb, device=device, folder=folder, workers=num_workers))
        totals: dict[str, float] = {}
        samples: list[float] = []
        for stage in STAGES:
            with _sampling(started, samples if stage == "sharded" else []):
                cell.wait_for(
                    lambda cell, stage=stage: (
                        cell.is_done or len(list(Path(folder).glob(f"{stage}-rank*"))) == num_workers
                    ),
                    timeout_s=CELL_TIMEOUT_S,
                    what=f"workers to have {stage} the model",
                )
            assert not cell.is_done, cell.describe()
            totals[stage] = total_pss_mb(started)
            Path(folder, f"{stage}-go").touch()
        cell.wait(CELL_TIMEOUT_S)
        assert cell.error is None, cell.describe()
        return totals | {"peak": max([*samples, totals["sharded"]])}


@contextmanager
def _sampling(started: Kernel, samples: list[float]) -> Iterator[None]:
    """Measure repeatedly while the block runs."""
    is_over = threading.Event()

    def sample() -> None:
        while not is_over.wait(0.01):
            samples.append(total_pss_mb(started))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def in_kernel_shard(model_mb: int, device: str, folder: str, num_workers: int) -> None:
    import torch
    from torch import nn

    from nblaunch import notebook_launcher

    size = 2048 if model_mb else 8
    count = max(2, model_mb * 2**20 // (size * size * 4))
    with torch.device(device):
        model = nn.Sequential(
            *[nn.Sequential(nn.Linear(size, size, bias=False), nn.Tanh()) for _ in range(count)]
        )
    notebook_launcher(_shard, (model, size, folder), num_processes=num_workers, sync_weights=False)


def _shard(model: object, size: int, folder: str) -> None:
    import gc

    import torch

    from nblaunch import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Linear"])
    accelerator = Accelerator(fsdp_plugin=plugin)
    rank = accelerator.process_index
    _meet(folder, "built", rank)
    model = accelerator.prepare(model)
    gc.collect()
    _meet(folder, "sharded", rank)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[attr-defined]
    accelerator.backward(model(torch.ones(1, size)).mean())  # type: ignore[operator]
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    _meet(folder, "trained", rank)


def _meet(folder: str, stage: str, rank: int) -> None:
    Path(folder, f"{stage}-rank{rank}").touch()
    while not Path(folder, f"{stage}-go").exists():
        time.sleep(0.02)
