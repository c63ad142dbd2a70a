"""Costs on GPUs: training steps compared with hand-written loops, launches compared with Accelerate.

    python -m tests.benchmarks gpu            # about 4 minutes on one GPU or two
    python -m tests.benchmarks gpu --cpu      # the same code with few steps on CPU cores: its numbers mean nothing

Inside one launched job, a hand-written loop and ours take steps in turn, after a barrier each time. One model is so
small that the host limits its speed; the other keeps the GPU busy.

Launches are timed from the call to the end of rank 0's first optimizer step, with the clock that all processes of a
machine share. They are compared with a bare ``os.fork``, the least that a program can do: its children also start CUDA,
join NCCL and take a step. For one GPU, Accelerate starts no process but calls the function in the kernel, and it does
not let two processes share a GPU. The benchmark therefore compares launches on two GPUs; on one GPU, it compares the
first launch in a fresh kernel, and what that leaves in the kernel. Our command and torchrun start a script in turn,
timed from the call to the same step.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from nblaunch.backends.gpu import CUDA
from tests.benchmarks.bench import CELL_TIMEOUT_S, ROOT, Row, batches, call, free_port, kernel
from tests.kernels import Kernel, KernelTimeout

MIN_STEPS, MIN_LAUNCH = 0.98, 3.0
HAS_PEER = importlib.util.find_spec("accelerate") is not None
FASTER = "launch to first step, times faster"


@dataclass(frozen=True)
class Extent:
    """The size of the measurements.

    Args:
        backend: backend to compute on.
        rounds: pairs of laps of a loop.
        small_steps: steps in a lap with the small model.
        large_steps: steps in a lap with the large model.
        small: the small model, a key of ``SHAPES``.
        large: the large model, likewise.
        launches: launches in one kernel.
        kernels: fresh kernels for each launcher.
        first_cell: first cell of the kernels.
        env: variables of the kernels.
        is_new: start kernels in new interpreters.
    """

    backend: str
    rounds: int
    small_steps: int
    large_steps: int
    small: str
    large: str
    launches: int
    kernels: int
    first_cell: str = "import torch"
    env: tuple[tuple[str, str], ...] = ()
    is_new: bool = True

    def kernel(self, *, check: bool = True) -> AbstractContextManager[Kernel]:
        """Start a fresh kernel and run the first cell in it."""
        return kernel(self.first_cell, dict(self.env), check=check, is_new=self.is_new)


FULL = Extent("cuda", 7, 300, 40, "small", "large", launches=5, kernels=3)
ON_CPU = (("ACCELERATE_USE_CPU", "true"), ("OMP_NUM_THREADS", "1"))
# In a rehearsal, ranks should not spend time on imports that their kernel can make.
IMPORTED = "import torch; from nblaunch import Accelerator"
REHEARSAL = Extent(
    "cpu", 2, 3, 3, "tiny", "tiny large", launches=1, kernels=1, first_cell=IMPORTED, env=ON_CPU, is_new=False
)

# Shapes of batches: two dimensions for linear layers, three for a transformer's layers.
SHAPES = {"small": (128, 1024), "tiny": (4, 16), "large": (16, 128, 768), "tiny large": (2, 4, 24)}
NUM_LAYERS = {"small": 4, "tiny": 4, "large": 8, "tiny large": 1}


def measure(cpu: bool = False) -> Iterator[Row]:
    if cpu:
        yield Row("a rehearsal on CPU cores", "its numbers mean nothing")
        yield from rows(REHEARSAL, 2)
        return
    count = CUDA.device_count() if CUDA.affinity() else 0
    if not count:
        yield Row("GPUs of this machine", "none: nothing to measure")
        return
    yield Row("GPUs of this machine", f"{count}; measured on {'two' if count > 1 else 'one'}")
    yield from rows(FULL, min(count, 2))


def rows(extent: Extent, size: int) -> Iterator[Row]:
    """Yield all measurements that are possible on ``size`` devices, 1 or 2."""
    yield from _as_far_as_possible("steps", _step_rows(extent, size))
    yield from _as_far_as_possible("first launches", _first_launch_rows(extent))
    for count in range(1, size + 1):
        yield from _as_far_as_possible(f"launches of {count}", _launch_rows(extent, count))
    yield from _as_far_as_possible("scripts", _script_rows(extent, size))
    if size < 2 or not HAS_PEER:
        why = "starts processes for two GPUs or more" if HAS_PEER else "is not installed"
        yield Row(f"{FASTER} than accelerate", f"not measured: accelerate {why}")


def _as_far_as_possible(what: str, found: Iterator[Row]) -> Iterator[Row]:
    """Report the failure of a part in its place, and measure the other parts all the same."""
    try:
        yield from found
    except Exception as error:
        print(f"{what}: {type(error).__name__}: {error}", file=sys.stderr)
        first = (str(error).splitlines() or [""])[0]
        yield Row(what, f"FAILED ({type(error).__name__}: {first:.80}), see above", "a number", False)


def _step_rows(extent: Extent, size: int) -> Iterator[Row]:
    """Yield ratios of steps per second, with the additional time of a step."""
    where = f"{size} {'device' if extent.backend == 'cpu' else 'GPU'}{'s' if size > 1 else ''}"
    peer = "hand-written DDP's" if size > 1 else "a hand-written loop's"
    with extent.kernel() as started:
        for name, has_loader in ((extent.small, False), (extent.small, True), (extent.large, False)):
            steps = extent.small_steps if name == extent.small else extent.large_steps
            laps = call(
                started, in_kernel_steps, size, extent.backend, name, has_loader, extent.rounds, steps
            )
            ratio = statistics.median(raw / ours for raw, ours in laps)
            added_us = statistics.median(ours - raw for raw, ours in laps) / steps * 1e6
            per_s = steps / statistics.median(ours for _, ours in laps)
            yield Row(
                f"steps/s of a {name} model {'with a loader' if has_loader else 'on a fixed batch'}, {where}, "
                f"over {peer}",
                f"{ratio:.3f} ({per_s:.0f} steps/s, {added_us:+.0f} µs a step)",
                f">= {MIN_STEPS}",
                ratio >= MIN_STEPS,
            )


def _first_launch_rows(extent: Extent) -> Iterator[Row]:
    """Measure the first launch of a kernel on one device, ours and Accelerate's, each in separate kernels."""
    times: dict[str, list[float]] = {"nblaunch": []} | ({"accelerate": []} if HAS_PEER else {})
    is_held = {}
    for _ in range(extent.kernels):
        for library, found in times.items():
            with extent.kernel() as started:
                seconds, is_held[library] = call(started, in_kernel_first_launch, library, extent.backend)
                found.append(seconds)
    for library, found in times.items():
        kept = "holds the GPU from then on" if is_held[library] else "leaves the GPU alone"
        yield Row(
            f"first launch of a kernel to first step, one process, {library}",
            f"{statistics.median(found):.2f} s (the kernel {kept})",
        )


def _launch_rows(extent: Extent, size: int) -> Iterator[Row]:
    """Compare our launches with a bare fork, then with Accelerate, each in its own kernel: a hanging peer loses
    only its own row.
    """
    what = f"launch to first step, {size} process{'es' if size > 1 else ''}"
    ours, theirs, ratio = _launches(extent, size, "bare fork")
    yield Row(f"{what}, times a bare fork's", f"{1 / ratio:.2f} ({ours:.2f} s / {theirs:.2f} s)")
    if size == 1 or not HAS_PEER:
        return
    try:
        ours, theirs, ratio = _launches(extent, size, "accelerate")
        text = f"{ratio:.2f} ({theirs:.2f} s / {ours:.2f} s)"
    except KernelTimeout:
        ratio, text = math.inf, f"accelerate hung for {CELL_TIMEOUT_S:.0f} s"
    yield Row(f"{what}, times faster than accelerate", text, f">= {MIN_LAUNCH:g}", ratio >= MIN_LAUNCH)


def _launches(extent: Extent, size: int, peer: str) -> tuple[float, float, float]:
    """Return our seconds, the peer's seconds, and their ratio, as medians."""
    with extent.kernel(check=peer == "bare fork") as started:
        found = call(started, in_kernel_launches, peer, size, extent.backend, extent.launches)
    ours, theirs = (statistics.median(one[name] for one in found) for name in ("nblaunch", peer))
    return ours, theirs, statistics.median(one[peer] / one["nblaunch"] for one in found)


def _script_rows(extent: Extent, size: int) -> Iterator[Row]:
    options = ["--cpu"] if extent.backend == "cpu" else []
    launchers = {
        "nblaunch": ["nblaunch", "launch", *options, "--num_processes", str(size)],
        "torchrun": ["torch.distributed.run", "--standalone", "--nproc_per_node", str(size)],
    }
    with _Timer() as timer:
        script, threads = f"{timer.path}_script.py", {"OMP_NUM_THREADS": "1"}
        with open(script, "w") as file:
            file.write(
                f"from tests.benchmarks.gpu import _first_step\n_first_step('nblaunch', {timer.path!r})\n"
            )
        env = {
            **os.environ,
            **threads,
            **dict(extent.env),
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        }
        found = []
        for _ in range(extent.launches):
            lap = {}
            for name, words in launchers.items():
                run = functools.partial(
                    subprocess.run,
                    [sys.executable, "-m", *words, script],
                    check=True,
                    capture_output=True,
                    env=env,
                )
                lap[name] = timer.time(run)
            found.append(lap)
    ours, theirs = (statistics.median(lap[name] for lap in found) for name in launchers)
    what = f"script to first step, {size} process{'es' if size > 1 else ''}, times torchrun's"
    yield Row(what, f"{ours / theirs:.2f} ({ours:.2f} s / {theirs:.2f} s)")


# --- in the kernel ---------------------------------------------------------------------------------------------------


def in_kernel_steps(
    size: int, backend: str, name: str, has_loader: bool, num_rounds: int, num_steps: int
) -> Any:
    from nblaunch import notebook_launcher

    settings = (name, has_loader, num_rounds, num_steps)
    return notebook_launcher(_steps, settings, num_processes=size, backend=backend, dashboard="none")


def in_kernel_first_launch(library: str, backend: str) -> tuple[float, bool]:
    """Return the seconds from the call to the end of the first step on one device, and whether this kernel has then
    used CUDA.
    """
    import importlib

    import torch

    module = importlib.import_module(library)
    assert module.Accelerator, "what a notebook's first cell imports"
    options: dict[str, Any] = {"backend": backend} if library == "nblaunch" else {}
    with _Timer() as timer:
        seconds = timer.time(
            lambda: module.notebook_launcher(_first_step, (library, timer.path), num_processes=1, **options)
        )
    return seconds, torch.cuda.is_initialized()


def in_kernel_launches(peer: str, size: int, backend: str, num_launches: int) -> list[dict[str, float]]:
    """Return the seconds from the call to the end of the first step, ours and a peer's in turn, after one launch of
    each.
    """
    from nblaunch import notebook_launcher

    launchers: dict[str, Callable[[str], object]] = {
        "nblaunch": lambda path: notebook_launcher(_first_step, ("nblaunch", path), size, backend=backend)
    }
    if peer == "bare fork":
        launchers[peer] = lambda path: _fork_bare(size, backend, path)
    else:
        from accelerate import notebook_launcher as peer_launcher

        launchers[peer] = lambda path: peer_launcher(
            _first_step, ("accelerate", path), num_processes=size, use_port=str(free_port())
        )
    with _Timer() as timer:
        found = [
            {name: timer.time(lambda launch=launch: launch(timer.path)) for name, launch in launchers.items()}
            for _ in range(num_launches + 1)
        ]
    return found[1:]


class _Timer:
    """Times a launch until rank 0 has written the time to a file."""

    def __enter__(self) -> _Timer:
        import tempfile

        self._folder = tempfile.TemporaryDirectory()
        self.path = os.path.join(self._folder.name, "time")
        return self

    def time(self, launch: Callable[[], object]) -> float:
        """Return the seconds. Raise RuntimeError with the text that was written instead, or FileNotFoundError
        without a file.
        """
        begun = time.monotonic()
        launch()
        with open(self.path) as file:
            text = file.read()
        os.unlink(self.path)
        try:
            return float(text) - begun
        except ValueError:
            raise RuntimeError(text) from None

    def __exit__(self, *exc_info: object) -> None:
        self._folder.cleanup()


def _fork_bare(size: int, backend: str, path: str) -> None:
    from tests.benchmarks.launch_cost import bare, bare_group

    def work(rank: int) -> None:
        try:
            _bare_first_step(rank, size, backend, path)
        except Exception:  # otherwise nothing would report it
            with open(path, "w") as file:
                file.write(traceback.format_exc())

    if size == 1:
        bare(1, work)
    else:
        bare_group(size, "nccl" if backend == "cuda" else "gloo", work)


# --- in a worker -----------------------------------------------------------------------------------------------------


def _model(name: str = "small") -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    width, num_layers = SHAPES[name][-1], NUM_LAYERS[name]
    if len(SHAPES[name]) > 2:
        block = nn.TransformerEncoderLayer(width, 12, 4 * width, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(block, num_layers, enable_nested_tensor=False)
    layers = [layer for _ in range(num_layers) for layer in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def _first_step(library: str, path: str) -> None:
    import importlib

    import torch

    accelerator = importlib.import_module(library).Accelerator()
    module = _model()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.01))
    accelerator.backward(model(torch.ones(SHAPES["small"], device=accelerator.device)).mean())
    optimizer.step()
    if accelerator.is_main_process:
        _write_time(accelerator.device, path)


def _bare_first_step(rank: int, size: int, backend: str, path: str) -> None:
    """Take the first step with handwritten code."""
    import torch

    device = torch.device("cuda", rank) if backend == "cuda" else torch.device("cpu")
    if backend == "cuda":
        torch.cuda.set_device(device)
    model = _spread(_model().to(device), size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model(torch.ones(SHAPES["small"], device=device)).mean().backward()
    optimizer.step()
    if rank == 0:
        _write_time(device, path)


def _write_time(device: Any, path: str) -> None:
    _wait_for(device)
    with open(path, "w") as file:
        file.write(repr(time.monotonic()))


def _wait_for(device: Any) -> None:
    """Wait until the device has finished its work."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _spread(model: Any, size: int) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    if size == 1:
        return model
    device = next(model.parameters()).device
    return DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)


def _steps(name: str, has_loader: bool, num_rounds: int, num_steps: int) -> list[tuple[float, float]]:
    """Return the seconds of ``num_steps`` steps, hand-written and ours, by rounds; all ranks begin each lap
    together.
    """
    from nblaunch import Accelerator

    accelerator = Accelerator()
    dataset = _dataset(accelerator, name, num_steps) if has_loader else None
    raw, ours = _raw_loop(accelerator, name, dataset), _own_loop(accelerator, name, dataset)
    for loop in (raw, ours):
        loop(min(20, num_steps))
    laps = []
    for number in range(num_rounds):
        first, second = (raw, ours) if number % 2 else (ours, raw)  # take turns in being first
        pair = _lap(first, accelerator, num_steps), _lap(second, accelerator, num_steps)
        laps.append(pair if number % 2 else pair[::-1])
    return laps


def _lap(loop: Callable[[int], None], accelerator: Any, num_steps: int) -> float:
    _wait_for(accelerator.device)
    accelerator.wait_for_everyone()
    begun = time.perf_counter()
    loop(num_steps)
    _wait_for(accelerator.device)
    return time.perf_counter() - begun


def _dataset(accelerator: Any, name: str, num_steps: int) -> Any:
    import torch
    from torch.utils.data import TensorDataset

    batch, width = SHAPES[name]
    return TensorDataset(torch.randn(num_steps * batch * accelerator.num_processes, width))


def _batch(name: str, device: Any) -> Any:
    import torch

    return torch.randn(SHAPES[name], device=device)


def _raw_loop(accelerator: Any, name: str, dataset: Any) -> Callable[[int], None]:
    import torch
    from torch.utils.data import DataLoader, DistributedSampler

    device, size, rank = accelerator.device, accelerator.num_processes, accelerator.process_index
    model = _spread(_model(name).to(device), size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch, loader = _batch(name, device), None
    if dataset is not None:
        loader = DataLoader(
            dataset, SHAPES[name][0], sampler=DistributedSampler(dataset, size, rank, shuffle=False)
        )

    def loop(num_steps: int) -> None:
        for inputs in batches(loader, batch, num_steps):
            model(inputs.to(device)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return loop


def _own_loop(accelerator: Any, name: str, dataset: Any) -> Callable[[int], None]:
    import torch
    from torch.utils.data import DataLoader

    module = _model(name)
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.01))
    batch, loader = _batch(name, accelerator.device), None
    if dataset is not None:
        loader = accelerator.prepare(DataLoader(dataset, SHAPES[name][0]))

    def loop(num_steps: int) -> None:
        for inputs in batches(loader, batch, num_steps):
            accelerator.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    return loop
