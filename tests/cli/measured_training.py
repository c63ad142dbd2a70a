"""Trains a model and prints each rank's memory in bytes per parameter. test_estimate.py runs it as a program.

The model is so large (25 MB) that a process's other memory is negligible, and its batches have one row.
"""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from nblaunch import Accelerator
from nblaunch.host import memory
from nblaunch.notebook import run_spec
from nblaunch.spec import LaunchSpec
from nblaunch.training.strategies.fsdp2.strategy import FullyShardedDataParallelPlugin

WIDTH, NUM_BLOCKS = 1024, 6
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
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(NUM_BLOCKS))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = block(rows)
        return rows


def train(strategy: str, optimizer_name: str) -> dict[str, float]:
    """Return this process's own memory: after steps, and the peaks during backward and during the first forward."""
    plugin = FullyShardedDataParallelPlugin() if strategy == "fsdp2" else None
    accelerator = Accelerator(fsdp_plugin=plugin)
    memory.tune_allocator()
    _steps(accelerator, Blocks(1), 1, optimizer_name, look=int)  # let libraries allocate at their first use
    before = own_bytes()
    seen = _steps(accelerator, Blocks(WIDTH), WIDTH, optimizer_name, look=own_bytes)
    return {name: (num_bytes - before) / NUM_PARAMETERS for name, num_bytes in seen.items()}


def _steps(
    accelerator: Accelerator, model: Blocks, width: int, optimizer_name: str, look: Callable[[], int]
) -> dict[str, int]:
    """Take two steps; measure forward in the first, and backward, with the optimizer's state, in the second."""
    forward: list[int] = []
    backward: list[int] = []
    after: list[int] = []
    for block in model.blocks:
        block.register_forward_hook(lambda *_: None if after else forward.append(look()))
        block.register_full_backward_hook(lambda *_: backward.append(look()) if after else None)
    prepared, optimizer = accelerator.prepare(model, OPTIMIZERS[optimizer_name](model.parameters()))
    for _ in range(2):
        optimizer.zero_grad()
        accelerator.backward(prepared(torch.ones(1, width, requires_grad=True)).float().sum())
        optimizer.step()
        after.append(look())
    return {"step": max(after), "backward": max(backward), "forward": max(forward)}


def own_bytes() -> int:
    """Return the memory that belongs only to this process. Source: proc_pid_smaps(5)."""
    gc.collect()
    memory.trim()
    text = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(number) for number in re.findall(r"^Private_\w+:\s+(\d+) kB", text, re.MULTILINE)) * 1024


def main() -> None:
    # A garbage collection would write to pages that ranks share with this process, and so copy them.
    gc.disable()
    measured = []
    for num_processes, precision, strategy, optimizer_name in CASES:
        spec = LaunchSpec(
            function=train, args=(strategy, optimizer_name), num_processes=num_processes, backend="cpu",
            mixed_precision=precision, return_all=True,
        )  # fmt: skip
        case = [num_processes, precision, strategy, optimizer_name]
        measured.append({"case": case, "ranks": run_spec(spec, dashboard="none")})
    json.dump(measured, sys.stdout)


if __name__ == "__main__":
    main()
