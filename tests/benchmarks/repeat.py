"""Remains of a hundred launches in the kernel: descriptors, threads, processes, memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks.bench import Row, at_most, call, kernel

NUM_LAUNCHES, NUM_WARM_UP = 100, 5
MAX_RSS_MB = 20


def measure() -> Iterator[Row]:
    for has_group in (False, True):
        with kernel() as started:
            growth = call(started, in_kernel_repeat, has_group, NUM_LAUNCHES)
        what = f"{NUM_LAUNCHES} launches{' with a process group' if has_group else ''}"
        for name in ("descriptors", "threads", "processes"):
            yield at_most(f"{what}: growth of {name}", growth[name], 0, digits=0)
        yield at_most(f"{what}: growth of memory", growth["rss_mb"], MAX_RSS_MB, " MB", 1)


def in_kernel_repeat(has_group: bool, num_launches: int) -> dict[str, float]:
    import torch

    from nblaunch import notebook_launcher

    function, args = (_train, (torch.nn.Linear(100, 100),)) if has_group else (_nothing, ())
    for _ in range(NUM_WARM_UP):
        notebook_launcher(function, args, num_processes=2)
    before = in_kernel_state()
    for _ in range(num_launches):
        notebook_launcher(function, args, num_processes=2)
    after = in_kernel_state()
    return {name: after[name] - before[name] for name in after}


def _nothing() -> None:
    """Do nothing: the launched function."""


def _train(model: Any) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    dist.init_process_group()
    total = torch.ones(())
    dist.all_reduce(total)
    print("a line")
    return {"total": total, "weights": model.weight}


def in_kernel_state() -> dict[str, float]:
    import psutil

    gc.collect()
    own = psutil.Process()
    files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return {
        # Skip IPython's history, whose file is opened from time to time.
        "descriptors": sum("history.sqlite" not in file for file in files),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "processes": len(own.children(recursive=True)),  # including zombies
        "rss_mb": own.memory_info().rss / 1e6,
    }
