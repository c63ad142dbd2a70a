"""What a training step and a launch cost on GPUs: steps against hand-written DDP, launches against accelerate.

    python -m tests.benchmarks.gpu

Steps are taken inside one launched job, in turn by a hand-written loop and by ours, after a barrier each time. Launches
are timed in one kernel, in turn: from the call to the end of rank 0's first step, by the clock that all processes of a
machine share. accelerate runs a single process in the kernel itself and does not let two share a GPU, so launches are
compared where there are two GPUs or more.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from nblaunch.backends.cuda import BACKEND
from tests.benchmarks.bench import Row, batches, call, free_port, kernel, show

NUM_ROUNDS, NUM_STEPS, NUM_LAUNCHES = 7, 300, 5
BATCH, WIDTH = 128, 1024
MIN_STEPS, MIN_LAUNCH = 0.98, 3.0


def measure() -> Iterator[Row]:
    count = BACKEND.device_count() if BACKEND.affinity() else 0
    if not count:
        yield Row("GPUs of this machine", "none: nothing to measure")
        return
    size = min(count, 2)
    with kernel() as started:
        for has_loader in (False, True):
            what = "with a loader" if has_loader else "on a fixed batch"
            laps = call(started, in_kernel_steps, size, "cuda", has_loader)
            yield _step_row(
                f"steps/s {what}, {size} GPU{'s' if size > 1 else ''}, over hand-written DDP's", laps
            )
    if size < 2:
        yield Row("launch to first step, times faster than accelerate", "needs two GPUs")
        return
    with kernel() as started:
        yield _launch_row(call(started, in_kernel_launches, size, "cuda"))


def _step_row(what: str, laps: list[list[float]]) -> Row:
    """``laps``: seconds of the hand-written loop and of ours, a pair for each round."""
    ratio = statistics.median(raw / ours for raw, ours in laps)
    per_s = NUM_STEPS / statistics.median(ours for _, ours in laps)
    return Row(what, f"{ratio:.3f} ({per_s:.0f} steps/s)", f">= {MIN_STEPS}", ratio >= MIN_STEPS)


def _launch_row(pairs: list[list[float]]) -> Row:
    ratio = statistics.median(theirs / ours for ours, theirs in pairs)
    ours, theirs = (statistics.median(one[side] for one in pairs) for side in (0, 1))
    return Row(
        "launch to first step, times faster than accelerate",
        f"{ratio:.2f} ({ours:.2f} s / {theirs:.2f} s)", f">= {MIN_LAUNCH:g}", ratio >= MIN_LAUNCH,
    )  # fmt: skip


# --- in the kernel ---------------------------------------------------------------------------------------------------


def in_kernel_steps(size: int, backend: str, has_loader: bool) -> Any:
    from nblaunch import notebook_launcher

    return notebook_launcher(_steps, (has_loader,), num_processes=size, backend=backend, dashboard="none")


def in_kernel_launches(size: int, backend: str) -> list[tuple[float, float]]:
    """Seconds from the call to the first step's end, ours and accelerate's, after one launch of each."""
    import tempfile
    from functools import partial
    from pathlib import Path

    from accelerate import notebook_launcher as peer

    from nblaunch import notebook_launcher

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "time"

        def timed(launch: Callable[[], object]) -> float:
            begun = time.monotonic()
            launch()
            return float(path.read_text()) - begun

        ours = partial(notebook_launcher, _first_step, ("nblaunch", str(path)), size, backend=backend)

        def theirs() -> None:
            peer(_first_step, ("accelerate", str(path)), num_processes=size, use_port=str(free_port()))

        timed(ours), timed(theirs)
        return [(timed(ours), timed(theirs)) for _ in range(NUM_LAUNCHES)]


# --- in a worker -----------------------------------------------------------------------------------------------------


def _model() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def _first_step(library: str, path: str) -> None:
    import importlib

    import torch

    accelerator = importlib.import_module(library).Accelerator()
    module = _model()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.01))
    accelerator.backward(model(torch.ones(BATCH, WIDTH, device=accelerator.device)).mean())
    optimizer.step()
    if accelerator.device.type == "cuda":
        torch.cuda.synchronize()
    if accelerator.is_main_process:
        with open(path, "w") as file:
            file.write(repr(time.monotonic()))


def _steps(has_loader: bool) -> list[tuple[float, float]]:
    """Seconds of ``NUM_STEPS`` steps, hand-written and ours, in rounds; each begins together on all ranks."""
    from nblaunch import Accelerator

    accelerator = Accelerator()
    raw, ours = _raw_loop(accelerator, has_loader), _own_loop(accelerator, has_loader)
    raw(20), ours(20)
    laps = []
    for number in range(NUM_ROUNDS):
        first, second = (raw, ours) if number % 2 else (ours, raw)  # nobody always comes first
        pair = _lap(first, accelerator), _lap(second, accelerator)
        laps.append(pair if number % 2 else pair[::-1])
    return laps


def _lap(loop: Callable[[int], None], accelerator: Any) -> float:
    import torch

    accelerator.wait_for_everyone()
    begun = time.perf_counter()
    loop(NUM_STEPS)
    if accelerator.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def _dataset(accelerator: Any) -> Any:
    import torch
    from torch.utils.data import TensorDataset

    return TensorDataset(torch.randn(NUM_STEPS * BATCH * accelerator.num_processes, WIDTH))


def _raw_loop(accelerator: Any, has_loader: bool) -> Callable[[int], None]:
    import torch
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    device, size, rank = accelerator.device, accelerator.num_processes, accelerator.process_index
    model = _model().to(device)
    if size > 1:
        model = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(BATCH, WIDTH, device=device)
    if has_loader:
        dataset = _dataset(accelerator)
        loader = DataLoader(dataset, BATCH, sampler=DistributedSampler(dataset, size, rank, shuffle=False))

    def loop(num_steps: int) -> None:
        for inputs in batches(loader if has_loader else None, batch, num_steps):
            model(inputs.to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return loop


def _own_loop(accelerator: Any, has_loader: bool) -> Callable[[int], None]:
    import torch
    from torch.utils.data import DataLoader

    module = _model()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.01))
    batch = torch.randn(BATCH, WIDTH, device=accelerator.device)
    if has_loader:
        loader = accelerator.prepare(DataLoader(_dataset(accelerator), BATCH))

    def loop(num_steps: int) -> None:
        for inputs in batches(loader if has_loader else None, batch, num_steps):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    return loop


if __name__ == "__main__":
    sys.exit(not show("GPUs", measure()))
