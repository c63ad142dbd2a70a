"""A user's waiting time in a fresh kernel: the cell that imports a launcher, and the launch until the first steps.

    python -m tests.benchmarks first_steps [--num_kernels 7]

Two ranks train a small model with data parallelism for three steps. Each kernel launches twice: with nblaunch, with
Accelerate, or with torch.multiprocessing and handwritten DDP. The three take turns, and torch is imported before.
nblaunch imports torch's compiler while the kernel is idle, so its first launch comes directly after the importing cell
("Run all") in one kernel, and some seconds later in another. nblaunch is compiled to bytecode, as pip does it.
"""

from __future__ import annotations

import compileall
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nblaunch
from tests.benchmarks.bench import Row, call, free_port, kernel

NUM_RANKS, NUM_STEPS, NUM_KERNELS = 2, 3, 7
PAUSE_S = 4.0
IMPORTS = {
    "nblaunch": "from nblaunch import Accelerator, notebook_launcher",
    "accelerate": "from accelerate import Accelerator, notebook_launcher",
    "torch.multiprocessing": "import torch.multiprocessing",
}
"""The cell that imports a launcher."""

SETUP = "import torch, torch.nn, torch.optim"
ENVIRONMENTS = {"accelerate": {"ACCELERATE_USE_CPU": "true"}}


def measure(num_kernels: int = NUM_KERNELS) -> Iterator[Row]:
    cases = [(launcher, 0.0) for launcher in IMPORTS] + [("nblaunch", PAUSE_S)]
    found: dict[tuple[str, float], list[list[float]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        installed = shutil.copytree(Path(nblaunch.__file__).parent, Path(folder, "nblaunch"))
        compileall.compile_dir(installed, quiet=1)
        for _ in range(num_kernels):
            for (launcher, pause_s), seconds in found.items():
                seconds.append(_in_fresh_kernel(launcher, pause_s, folder))
    for (launcher, pause_s), seconds in found.items():
        importing, first, second = (statistics.median(each) for each in zip(*seconds, strict=True))
        after = f" {pause_s:g} s later" if pause_s else ""
        what = f"{launcher}: importing cell / call to step {NUM_STEPS}, first launch{after} / second"
        spread = (
            f"first launch {min(one[1] for one in seconds):.2f} to {max(one[1] for one in seconds):.2f} s"
        )
        yield Row(what, f"{importing:.2f} s / {first:.2f} s / {second:.2f} s ({spread})")


def _in_fresh_kernel(launcher: str, pause_s: float, folder: str) -> list[float]:
    """Return the seconds of the importing cell, of the first launch and of the second.

    Args:
        launcher: a key of :data:`IMPORTS`.
        pause_s: seconds between the importing cell and the first launch.
        folder: folder that contains nblaunch with its bytecode.
    """
    setup = f"{SETUP}, sys; sys.path.insert(0, {folder!r})"
    with kernel(setup, ENVIRONMENTS.get(launcher), check=launcher == "nblaunch") as started:
        begun = "import time; begun = time.monotonic()"
        imported = started.run(f"{begun}\n{IMPORTS[launcher]}\ntime.monotonic() - begun")
        time.sleep(pause_s)
        launches: list[float] = call(started, in_kernel_launches, launcher)
        return [float(str(imported.result)), *launches]


def in_kernel_launches(launcher: str) -> list[float]:
    """Return the seconds from the call to the end of rank 0's last step, for two launches."""
    launch: Callable[[str], object] = LAUNCHES[launcher]
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2):
            path = Path(folder, str(number))
            begun_s = time.monotonic()
            launch(str(path))
            seconds.append(json.loads(path.read_text()) - begun_s)
    return seconds


def _by_nblaunch(path: str) -> None:
    from nblaunch import notebook_launcher

    notebook_launcher(_train, ("nblaunch", path), num_processes=NUM_RANKS)


def _by_accelerate(path: str) -> None:
    from accelerate import notebook_launcher

    notebook_launcher(_train, ("accelerate", path), num_processes=NUM_RANKS, use_port=str(free_port()))


def _by_hand(path: str) -> None:
    from torch.multiprocessing import start_processes

    start_processes(_train_by_hand, (path, free_port()), nprocs=NUM_RANKS, start_method="fork")


LAUNCHES = {"nblaunch": _by_nblaunch, "accelerate": _by_accelerate, "torch.multiprocessing": _by_hand}


def _train(library: str, path: str) -> None:
    import importlib

    import torch

    accelerator = importlib.import_module(library).Accelerator()
    model = _model()
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        accelerator.backward(wrapped(torch.ones(8, 64)).mean())
        optimizer.step()
    if accelerator.is_main_process:
        _write_time(path)


def _train_by_hand(rank: int, path: str, port: int) -> None:
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)  # as the launchers do
    distributed.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    model = _model()
    wrapped, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        wrapped(torch.ones(8, 64)).mean().backward()
        optimizer.step()
    if rank == 0:
        _write_time(path)
    distributed.destroy_process_group()


def _model() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def _write_time(path: str) -> None:
    Path(path).write_text(json.dumps(time.monotonic()))
