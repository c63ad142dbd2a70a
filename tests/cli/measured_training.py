"""Trains a model for real and prints what each rank took, in bytes per parameter. Run as a program by test_estimate.py.

The model is large enough (50 MB) for everything else of a process to be noise, and its batches are one row.
"""

from __future__ import annotations

import gc
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from nblaunch import Accelerator
from nblaunch.backends import host_memory
from nblaunch.launch.job import Job
from nblaunch.launch.preflight import plan_launch
from nblaunch.spec import LaunchSpec

WIDTH, NUM_BLOCKS = 1024, 12
NUM_PARAMETERS = NUM_BLOCKS * WIDTH * WIDTH
OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}
CASES = (
    (1, "no", "single", "adam"),
    (1, "bf16", "single", "adam"),
    (1, "no", "single", "momentum"),
    (1, "no", "single", "sgd"),
    (2, "no", "ddp", "adam"),
    (2, "no", "fsdp2", "adam"),
    (3, "no", "fsdp2", "sgd"),
)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_BLOCKS))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = block(rows)
        return rows


def train(strategy: str, optimizer_name: str) -> dict[str, float]:
    """Peaks of this process's own memory: while a step has gradients and states, and while a block computes."""
    accelerator = Accelerator()
    host_memory.tune_allocator()
    _steps(
        accelerator, nn.Linear(1, 1), 1, optimizer_name, "single"
    )  # what libraries make at their first use
    before = own_bytes()
    step, forward = _steps(accelerator, Blocks(), WIDTH, optimizer_name, strategy)
    return {"step": (step - before) / NUM_PARAMETERS, "forward": (forward - before) / NUM_PARAMETERS}


def _steps(
    accelerator: Accelerator, model: nn.Module, width: int, optimizer_name: str, strategy: str
) -> tuple[int, int]:
    seen: list[int] = []
    for block in getattr(model, "blocks", ()):
        block.register_forward_hook(lambda *_: seen.append(own_bytes()))
    if strategy == "fsdp2":
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block)
        prepared: Any = fully_shard(model)
    else:
        prepared = accelerator.prepare(model)
    optimizer = OPTIMIZERS[optimizer_name](prepared.parameters())
    peak = 0
    for _ in range(3):
        optimizer.zero_grad()
        prepared(torch.ones(1, width)).float().sum().backward()
        optimizer.step()
        peak = max(peak, own_bytes())
    return peak, max(seen[:NUM_BLOCKS], default=0)  # of the first pass: no gradients and states yet


def own_bytes() -> int:
    """Memory that only this process has. Source: proc_pid_smaps(5)."""
    gc.collect()
    host_memory.trim()
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(number) for number in re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.MULTILINE)) * 1024


def main() -> None:
    measured = []
    for num_processes, precision, strategy, optimizer_name in CASES:
        spec = LaunchSpec(
            function=train, args=(strategy, optimizer_name), num_processes=num_processes, backend="cpu",
            mixed_precision=precision, return_all=True,
        )  # fmt: skip
        job = Job(spec, plan_launch(spec), [])
        job.run()
        case = [num_processes, precision, strategy, optimizer_name]
        measured.append({"case": case, "ranks": job.result()})
    json.dump(measured, sys.stdout)


if __name__ == "__main__":
    main()
