"""What a launch decides and refuses before a process starts; and what workers find in their environment."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from nblaunch import backends, env, notebook_launcher
from nblaunch.backends.cpu import CpuBackend
from nblaunch.diagnosis import memory
from nblaunch.errors import LaunchError
from nblaunch.launcher.debug_client import DebugClient, KeptFailure
from nblaunch.launcher.plan import memory_warnings, plan_launch
from nblaunch.spec import LaunchSpec
from tests.kernels import Kernel


def train(*args: Any) -> None:
    """Never called here: the launch is only planned."""


# --- environment variables -------------------------------------------------------------------------------------------

NONSENSE = "nonsense, of course"


@pytest.mark.parametrize("name", [name for name, row in env.TABLE.items() if row.type.valid != "a text"])
def test_nonsense_is_refused_before_the_launch(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, NONSENSE)
    with pytest.raises(ValueError, match=f"^environment variable {name}='{NONSENSE}': must be "):
        plan_launch(LaunchSpec(train, num_processes=1, backend="cpu"))


def restarts() -> list[str]:
    return [os.environ[f"TORCHELASTIC_{name}"] for name in ("RESTART_COUNT", "MAX_RESTARTS")]


def test_workers_know_how_often_they_may_be_started_again() -> None:
    """As under torchrun: scripts look whether this is their last attempt."""
    found = notebook_launcher(restarts, (), 1, max_restarts=3, backend="cpu", dashboard="none")
    assert found == ["0", "3"]


# --- the number of workers -------------------------------------------------------------------------------------------


def planned(num_processes: int | None = None) -> int:
    return plan_launch(LaunchSpec(train, num_processes=num_processes, backend="cpu")).num_processes


def test_one_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NBLAUNCH_NUM_PROCESSES", raising=False)
    assert planned() == backends.choose("cpu").device_count()


def test_the_environment_says_how_many_unless_the_call_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBLAUNCH_NUM_PROCESSES", "3")
    assert planned() == 3
    assert planned(5) == 5


@pytest.mark.parametrize("text", ["0", "-2", "two"])
def test_a_number_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("NBLAUNCH_NUM_PROCESSES", text)
    with pytest.raises(ValueError, match=f"NBLAUNCH_NUM_PROCESSES='{text}': must be a whole number of"):
        planned()


# --- devices that kept workers have ----------------------------------------------------------------------------------


class _Kept(KeptFailure):
    def _release(self) -> None:
        """Nothing is kept in truth."""


@pytest.mark.parametrize("has_devices", [False, True])
def test_kept_workers_are_given_up_for_the_devices_that_they_have(
    monkeypatch: pytest.MonkeyPatch, has_devices: bool
) -> None:
    kept = _Kept(DebugClient({}), 0)

    def refusal(backend: CpuBackend) -> str | None:
        return "taken" if has_devices and not kept.is_released else None

    monkeypatch.setattr(CpuBackend, "launch_refusal", refusal)
    plan_launch(LaunchSpec(train, num_processes=1, backend="cpu"))
    assert kept.is_released is has_devices
    kept.release()


def test_devices_that_others_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "launch_refusal", lambda backend: "taken by others")
    with pytest.raises(LaunchError, match="taken by others"):
        plan_launch(LaunchSpec(train, num_processes=1, backend="cpu"))


# --- room in memory for what training the modules takes ---------------------------------------------------------------

MODEL = torch.nn.Linear(1000, 1000, bias=False)  # 4 MB


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
