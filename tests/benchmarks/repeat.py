"""What a hundred launches leave in the kernel: descriptors, threads, zombies, memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks.bench import Row, at_most, call, kernel

NUM_LAUNCHES, NUM_WARM_UP = 100, 5
MAX_RSS_MB = 20


def measure() -> Iterator[Row]:
    for has_group in (False, True):
        with kernel() as started:
            growth = call(started, in_kernel_repeat, has_group)
        what = f"{NUM_LAUNCHES} launches{' with a process group' if has_group else ''}"
        for name in ("descriptors", "threads", "zombies"):
            yield at_most(f"{what}: growth of {name}", growth[name], 0, digits=0)
        yield at_most(f"{what}: growth of memory", growth["rss_mb"], MAX_RSS_MB, " MB", 1)


def in_kernel_repeat(has_group: bool) -> dict[str, float]:
    for _ in range(NUM_WARM_UP):
        _launch(has_group)
    before = in_kernel_state()
    for _ in range(NUM_LAUNCHES):
        _launch(has_group)
    after = in_kernel_state()
    return {name: after[name] - before[name] for name in after}


def _launch(has_group: bool) -> None:
    from nblaunch import notebook_launcher

    notebook_launcher(_meet if has_group else _nothing, num_processes=2)


def _nothing() -> None:
    """The function that is launched."""


def _meet() -> None:
    import torch.distributed as dist

    dist.init_process_group()
    dist.barrier()


def in_kernel_state() -> dict[str, float]:
    import psutil

    own = psutil.Process()
    files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return {
        # Not the history of IPython, whose file is opened now and then.
        "descriptors": sum("history.sqlite" not in file for file in files),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "zombies": sum(child.status() == psutil.STATUS_ZOMBIE for child in own.children()),
        "rss_mb": own.memory_info().rss / 1e6,
    }
