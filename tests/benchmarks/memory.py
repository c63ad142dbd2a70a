"""Whether workers share the kernel's model: proportional memory of a whole launch with and without a model.

Proportional set size (PSS) counts a page that n processes share as 1/n in each, so its sum over kernel, forkserver and
workers is their total memory. Every worker reads all of the weights; then it collects its garbage, which writes to the
headers of Python objects and must not copy the model either.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.bench import Row, at_most, kernel
from tests.kernels import Kernel

NUM_WORKERS = 8
MODEL_MB = 400
_CELL = "from tests.benchmarks import memory\nmemory.in_kernel_hold({mb}, {method!r}, {folder!r})"


def measure() -> Iterator[Row]:
    for method, copies in (("fork", 1), ("forkserver", 2)):
        with kernel() as started:
            base, loaded = (total_mb(started, method, size) for size in (0, MODEL_MB))
        where = f"{NUM_WORKERS} workers by {method}, {MODEL_MB} MB model"
        for moment, with_model, without in zip(("", ", after gc.collect()"), loaded, base, strict=True):
            limit = MODEL_MB * (copies + 0.1)
            yield at_most(f"{where}{moment}: PSS above none", with_model - without, limit, " MB", 0)


def total_mb(started: Kernel, method: str, model_mb: int) -> tuple[float, float]:
    """Return the memory of the whole launch in MB after every worker has read the model, and after their garbage
    collections.
    """
    with tempfile.TemporaryDirectory() as folder:
        cell = started.submit(_CELL.format(mb=model_mb, method=method, folder=folder))
        totals = []
        for stage in ("read", "collected"):
            cell.wait_for(
                lambda _, stage=stage: _count(folder, stage) == NUM_WORKERS, what=f"workers have {stage}"
            )
            totals.append(total_pss_mb(started))
            Path(folder, f"{stage}-go").touch()
        cell.wait()
        assert cell.error is None, cell.describe()
        return totals[0], totals[1]


def _count(folder: str, stage: str) -> int:
    return len(list(Path(folder).glob(f"{stage}-rank*")))


def total_pss_mb(started: Kernel) -> float:
    pids = [started.pid, *(process.pid for process in started.processes())]
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    return (
        sum(int(kilobytes) for text in texts for kilobytes in re.findall(r"^Pss: +(\d+) kB", text, re.M))
        / 1024
    )


def in_kernel_hold(model_mb: int, method: str, folder: str) -> None:
    import torch

    from nblaunch import notebook_launcher

    model = torch.nn.Embedding(max(1, model_mb * 1024 * 1024 // 4096), 1024)
    notebook_launcher(
        _hold, (model, folder), num_processes=NUM_WORKERS, start_method=method, sync_weights=False
    )


def _hold(model: object, folder: str) -> None:
    import gc
    import os

    with_weights: object = model.weight.sum().item()  # type: ignore[attr-defined]  # reads every page
    for stage in ("read", "collected"):
        Path(folder, f"{stage}-rank{os.environ['RANK']}").touch()
        while not Path(folder, f"{stage}-go").exists():
            time.sleep(0.02)
        gc.collect()
    del with_weights
