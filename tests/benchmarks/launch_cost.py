"""The cost of a launch compared with a bare ``os.fork``: with an empty function, and with a process group.

Both sides start the same number of children from the same kernel, in turn. The bare side does the least that a program
can do: fork, the same work in the children, ``os._exit``, ``waitpid``. One part runs each launch and each
bare fork in a cell of its own.

A fork takes longer the more memory the kernel holds, while the other work of a launch takes about the same time. The
ratio therefore depends on the kernel, and is measured in two: in the middle of a notebook, and with only torch
imported.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial

from tests.benchmarks.bench import (
    CELL_TIMEOUT_S,
    ROOT,
    Row,
    alternate,
    at_most,
    call,
    free_port,
    kernel,
    pairs_of,
)
from tests.kernels import KernelTimeout

SIZES = (2, 4, 8)
NUM_PAIRS = {"nblaunch": 25, "accelerate": 9, "lightning": 9}
NUM_CELLS = 15
MAX_EMPTY, MAX_GROUP = 1.5, 1.4

IN_A_NOTEBOOK = """
import matplotlib.pyplot, numpy, pandas, sklearn.datasets, torch
images = torch.rand(60_000, 1, 28, 28)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 1000), torch.nn.ReLU(), torch.nn.Linear(1000, 10))
"""
"""The state of a kernel before a launch: the usual imports, a data set of MNIST's size, a model."""

KERNELS = {"in a notebook": IN_A_NOTEBOOK, "in a bare kernel": "import torch"}


def measure() -> Iterator[Row]:
    for where, launcher in itertools.product(KERNELS, NUM_PAIRS):
        # it joins a group in any case
        for has_group in (False, True) if launcher != "lightning" else (True,):
            yield from _rows(where, launcher, has_group)
    yield from _one_per_cell()
    with kernel() as started:
        import_s, first_s, second_s = call(started, in_kernel_first_launch)
        what = "fresh kernel, 2 workers: from nblaunch import notebook_launcher / first launch / second"
        yield Row(what, " / ".join(f"{seconds * 1e3:.0f} ms" for seconds in (import_s, first_s, second_s)))
    yield at_most("import nblaunch", import_ms(), 50, " ms", 1)


def _rows(where: str, launcher: str, has_group: bool) -> Iterator[Row]:
    """Yield a row per number of workers; a hanging peer loses only its own rows."""
    with (
        tempfile.TemporaryDirectory() as folder,
        kernel(KERNELS[where], _environment(launcher, folder), check=launcher == "nblaunch") as started,
    ):
        for size in SIZES:
            try:
                pairs = call(started, in_kernel_ratio, launcher, size, has_group, NUM_PAIRS[launcher])
            except KernelTimeout:
                if launcher == "nblaunch":
                    raise
                yield Row(_what(where, launcher, size, has_group), f"hung for {CELL_TIMEOUT_S:.0f} s")
                return
            yield _row(where, launcher, size, has_group, pairs)


def _one_per_cell() -> Iterator[Row]:
    """Yield a row per number of workers. A kernel writes its history and new objects between two cells."""
    with (
        tempfile.TemporaryDirectory() as folder,
        kernel(IN_A_NOTEBOOK, _environment("nblaunch", folder)) as started,
    ):
        for size in SIZES:
            launch, fork = (
                partial(call, started, in_kernel_seconds, launcher, size) for launcher in ("nblaunch", "fork")
            )
            pairs = pairs_of(launch, fork, NUM_CELLS)
            what = (
                f"nblaunch in a notebook, one launch in each cell, {size} workers, empty function: times fork"
            )
            yield Row(what, f"{pairs.ratio:.2f} ({pairs.a_s * 1e3:.0f} ms / {pairs.b_s * 1e3:.0f} ms)")


def in_kernel_seconds(launcher: str, size: int) -> float:
    """Seconds of one launch with nothing in the function, or of bare forks."""
    from nblaunch import notebook_launcher

    begin_s = time.perf_counter()
    if launcher == "nblaunch":
        notebook_launcher(_nothing, num_processes=size)
    else:
        bare(size)
    return time.perf_counter() - begin_s


def _environment(launcher: str, log_dir: str) -> dict[str, str]:
    if launcher == "accelerate":
        return {"ACCELERATE_USE_CPU": "true"}
    # Keep old logs: ext4 skips inodes that were deleted in the last 5 s one by one. At 30 launches per second, each of
    # which removes old logs, creating a file would take milliseconds. Notebooks do not launch that often.
    return {"NBLAUNCH_LOG_DIR": log_dir, "NBLAUNCH_KEEP_JOBS": "1000"}


def _what(where: str, launcher: str, size: int, has_group: bool) -> str:
    function = "process group and barrier" if has_group else "empty function"
    return f"{launcher} {where}, {size} workers, {function}: times fork"


def _row(where: str, launcher: str, size: int, has_group: bool, pairs: dict[str, float]) -> Row:
    what = _what(where, launcher, size, has_group)
    value = f"{pairs['ratio']:.2f} ({pairs['a_s'] * 1e3:.0f} ms / {pairs['b_s'] * 1e3:.0f} ms)"
    if launcher != "nblaunch" or KERNELS[where] != IN_A_NOTEBOOK:
        return Row(what, value)
    limit = MAX_GROUP if has_group else MAX_EMPTY
    return Row(what, value, f"<= {limit}", pairs["ratio"] <= limit)


def import_ms(repeats: int = 9) -> float:
    """Return the shortest time of ``import nblaunch`` in a fresh interpreter, measured inside it."""
    program = "import time; t = time.perf_counter(); import nblaunch; print((time.perf_counter() - t) * 1e3)"
    command = [sys.executable, "-c", program]
    return min(float(subprocess.check_output(command, cwd=ROOT, text=True)) for _ in range(repeats))


def in_kernel_first_launch() -> list[float]:
    """Return the seconds of the import, the first launch and the second launch."""
    marks = [time.perf_counter()]
    from nblaunch import notebook_launcher

    marks.append(time.perf_counter())
    for _ in range(2):
        notebook_launcher(_nothing, num_processes=2)
        marks.append(time.perf_counter())
    return [later - earlier for earlier, later in itertools.pairwise(marks)]


def in_kernel_ratio(launcher: str, size: int, has_group: bool, num_pairs: int) -> dict[str, float]:
    function = _meet if has_group else _nothing
    if launcher == "nblaunch":
        from nblaunch import notebook_launcher

        def launch() -> None:
            notebook_launcher(function, num_processes=size)
    elif launcher == "lightning":
        from lightning_fabric import Fabric

        logging.getLogger("lightning_fabric").setLevel(logging.ERROR)

        def launch() -> None:
            fabric = Fabric(accelerator="cpu", devices=size, strategy="ddp_notebook")
            fabric.launch(lambda _: function())
    else:
        from accelerate import notebook_launcher as peer

        def launch() -> None:
            peer(function, (), num_processes=size, use_port=str(free_port()))

    return asdict(alternate(launch, lambda: (bare_group if has_group else bare)(size), num_pairs))


def _nothing() -> None:
    """Do nothing: the function for measuring the launcher alone."""


def _meet() -> None:
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group()
    dist.barrier()


def bare(
    size: int, work: Callable[[int], None] | None = None, once_forked: Callable[[], object] | None = None
) -> None:
    """Fork children that each do their work and end at once.

    Args:
        size: number of children.
        work: called in each child with its number; None: nothing.
        once_forked: called in this process when all have started; its value is kept alive until they have ended.
    """
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            try:
                if work is not None:
                    work(rank)
            finally:
                os._exit(0)
        pids.append(pid)
    kept = once_forked() if once_forked is not None else None
    for pid in pids:
        os.waitpid(pid, 0)
    del kept


def bare_group(
    size: int, process_group: str = "gloo", work: Callable[[int], None] = lambda rank: _meet()
) -> None:
    """Do the same in a process group.

    The store starts after the forks, because a fork may copy a resolver lock that the store's thread holds.
    """
    from torch.distributed import TCPStore

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]

    def join(rank: int) -> None:
        import torch.distributed as dist

        listener.close()
        store = TCPStore("127.0.0.1", port, None, False)
        dist.init_process_group(process_group, store=store, rank=rank, world_size=size)
        work(rank)

    def host() -> TCPStore:
        return TCPStore(
            "127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    bare(size, join, host)
