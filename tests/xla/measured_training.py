"""Trains for real on XLA devices and returns what each rank took, in bytes per parameter, for test_estimate.py.

Devices of PJRT on the CPU keep what they hold in their process's memory, and so it can be seen.
"""

from __future__ import annotations

import importlib

import torch

from nblaunch import Accelerator
from nblaunch.notebook import run_spec
from nblaunch.spec import LaunchSpec
from tests.cli import measured_training as on_cpu


def train() -> float:
    accelerator = Accelerator()
    _steps(accelerator, 1)
    before = on_cpu.own_bytes()
    return (_steps(accelerator, on_cpu.WIDTH) - before) / on_cpu.NUM_PARAMETERS


def _steps(accelerator: Accelerator, width: int) -> int:
    """This process's memory after steps of Adam; the least of some, for buffers are freed a moment after their use."""
    model = on_cpu.Blocks(width)
    prepared, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
    seen = []
    for _ in range(3):
        optimizer.zero_grad()
        accelerator.backward(prepared(torch.ones(1, width, device=accelerator.device)).float().sum())
        optimizer.step()
        importlib.import_module("torch_xla").sync(wait=True)
        seen.append(on_cpu.own_bytes())
    return min(seen[1:])


def measure() -> dict[str, list[float]]:
    """Return what each of two ranks took, by precision."""
    measured = {}
    for precision in ("no", "bf16"):
        spec = LaunchSpec(
            function=train, num_processes=2, backend="xla", mixed_precision=precision, return_all=True
        )
        measured[precision] = run_spec(spec, dashboard="none")
    return measured
