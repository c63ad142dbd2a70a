"""Trains on XLA devices and returns each rank's memory in bytes per parameter, for test_estimate.py.

PJRT's devices on the CPU keep their data in the process's memory, where it can be measured.
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
    """Return this process's memory after steps of Adam: the smallest of several readings, because buffers are freed
    with a delay.
    """
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
    """Return the memory of each of two ranks, by precision."""
    measured = {}
    for precision in ("no", "bf16"):
        spec = LaunchSpec(
            function=train, num_processes=2, backend="xla", mixed_precision=precision, return_all=True
        )
        measured[precision] = run_spec(spec, dashboard="none")
    return measured
