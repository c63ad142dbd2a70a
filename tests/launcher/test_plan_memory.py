"""Before a launch: whether the host has room for what training the passed modules must at least take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nblaunch.diagnosis import memory
from nblaunch.launcher.plan import memory_warnings, plan_launch
from nblaunch.spec import LaunchSpec
from tests.kernels import Kernel

MODEL = torch.nn.Linear(1000, 1000, bias=False)  # 4 MB


def train(*args: Any) -> None:
    """Never called here: the launch is only planned."""


def warnings_with(monkeypatch: pytest.MonkeyPatch, available: int | None, args: tuple[Any, ...]) -> list[str]:
    facts = replace(memory.read_facts(), available=available)
    monkeypatch.setattr(memory, "read_facts", lambda: facts)
    spec = LaunchSpec(train, args, num_processes=8, backend="cpu", start_method="fork")
    return memory_warnings(plan_launch(spec), spec)


def test_too_little_memory_is_reported_with_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    # Weights that change and gradients, in 8 processes: 8 x 2 x 4 MB.
    (text,) = warnings_with(monkeypatch, 63_999_999, (MODEL,))
    assert "training 4.00 MB of parameters in 8 processes takes at least 64.0 MB of host memory" in text
    assert "64.0 MB are available" in text
    assert "Use fewer processes" in text


@pytest.mark.parametrize(
    ("available", "args"), [(64_000_000, (MODEL,)), (None, (MODEL,)), (0, ()), (0, (3, "text"))]
)
def test_silent_where_there_is_room_or_nothing_is_known(
    monkeypatch: pytest.MonkeyPatch, available: int | None, args: tuple[Any, ...]
) -> None:
    assert warnings_with(monkeypatch, available, args) == []


def test_parameters_that_are_not_trained_stay_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen = torch.nn.Linear(1000, 1000, bias=False).requires_grad_(False)
    assert warnings_with(monkeypatch, 0, (frozen,)) == []


def test_the_cell_shows_it_before_the_workers_run(kernel: Kernel) -> None:
    cell = kernel.run(
        """
import torch
from dataclasses import replace
from nblaunch import notebook_launcher
from nblaunch.diagnosis import memory
facts = replace(memory.read_facts(), available=1000)
memory.read_facts = lambda: facts
notebook_launcher(lambda model: print("runs"), (torch.nn.Linear(10, 100),), num_processes=2)
"""
    )
    lines = cell.stdout.splitlines()
    assert lines[0].startswith("nblaunch: training 4.40 kB of parameters in 2 processes")
    assert {"[0] runs", "[1] runs"} <= set(lines)
