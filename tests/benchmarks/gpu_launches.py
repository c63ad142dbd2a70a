"""How many launches succeed in one kernel that has used its GPU before, without a restart; ours and Accelerate's.

    python -m tests.benchmarks gpu_launches      # 17 launches in each of three kernels, about 5 minutes on a GPU

Accelerate does not share a GPU between processes, and starts none for one GPU, so it is measured on two or more GPUs.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

from nblaunch.backends.gpu import CUDA
from tests.benchmarks.bench import Row, call, count, free_port, kernel

LAUNCHES = 17
BEFORE = {
    "a forward": "model = torch.nn.Linear(8, 8, device={device!r}); model(torch.ones(2, 8, device={device!r}))",
    "a backward": "torch.nn.Linear(8, 8, device={device!r})(torch.ones(2, 8, device={device!r})).sum().backward()",
    "import bitsandbytes": "import bitsandbytes",
}


def measure() -> Iterator[Row]:
    num_gpus = CUDA.device_count() if CUDA.affinity() else 0
    if not num_gpus:
        yield Row("GPUs of this machine", "none: nothing to measure")
        return
    yield from rows("cuda", LAUNCHES, num_gpus)


def rows(device: str, num_launches: int, num_devices: int) -> Iterator[Row]:
    """Measure launches of two processes on ``device``, by what the kernel has done before."""
    for what, cell in BEFORE.items():
        name = f"launches after {what} in the kernel"
        module = cell.rpartition("import ")[2] if cell.startswith("import ") else ""
        if module and importlib.util.find_spec(module) is None:
            yield Row(name, f"not measured: {module} is not installed")
            continue
        libraries = ["nblaunch"]
        if importlib.util.find_spec("accelerate") is not None and num_devices > 1:
            libraries.append("accelerate")
        for library in libraries:
            with kernel() as started:
                started.run(cell.format(device=device))
                failures = call(started, in_kernel_failures, library, device, num_launches)
            good, note = num_launches - len(failures), failures[0][:80] if failures else ""
            row = count(f"{name}, {library}", good, num_launches, note)
            yield row if library == "nblaunch" else Row(row.what, row.value)


def in_kernel_failures(library: str, backend: str, num_launches: int) -> list[str]:
    """Launch this many times; return the errors of failed launches."""
    module = importlib.import_module(library)
    launch, _ = module.notebook_launcher, module.Accelerator  # a notebook's first cell imports both
    options: dict[str, Any] = (
        {"backend": backend, "dashboard": "none"} if library == "nblaunch" else {"use_port": str(free_port())}
    )
    failures = []
    for _ in range(num_launches):
        try:
            launch(_add_up, (library,), num_processes=2, **options)
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
    return failures


def _add_up(library: str) -> None:
    import torch

    accelerator = importlib.import_module(library).Accelerator()
    model = accelerator.prepare(torch.nn.Linear(8, 1))
    accelerator.backward(model(torch.ones(2, 8, device=accelerator.device)).sum())
    total = accelerator.reduce(torch.ones(1, device=accelerator.device), "sum")
    assert total.item() == accelerator.num_processes == 2
