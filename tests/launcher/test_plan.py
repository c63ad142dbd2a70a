"""Decisions and rejections before any process starts, and the environment of workers."""

from __future__ import annotations

import os
from typing import Any

import pytest

from nblaunch import backends, env, notebook_launcher
from nblaunch.backends.cpu import CpuBackend
from nblaunch.errors import LaunchError
from nblaunch.launcher.debug_client import DebugClient, KeptFailure
from nblaunch.launcher.plan import plan_launch
from nblaunch.spec import LaunchSpec


def train(*args: Any) -> None:
    """Do nothing: the launch is only planned."""


# --- environment variables -------------------------------------------------------------------------------------------

NONSENSE = "nonsense, of course"


@pytest.mark.parametrize("name", [name for name, row in env.TABLE.items() if row.type.valid != "text"])
def test_invalid_settings_are_rejected_before_the_launch(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, NONSENSE)
    with pytest.raises(ValueError, match=f"^environment variable {name}='{NONSENSE}' must be "):
        plan_launch(LaunchSpec(train, num_processes=1, backend="cpu"))


def restarts() -> list[str]:
    return [os.environ[f"TORCHELASTIC_{name}"] for name in ("RESTART_COUNT", "MAX_RESTARTS")]


def test_workers_know_max_restarts() -> None:
    """Under torchrun, too, scripts check whether this is their last attempt."""
    found = notebook_launcher(restarts, (), 1, max_restarts=3, backend="cpu", dashboard="none")
    assert found == ["0", "3"]


# --- the number of workers -------------------------------------------------------------------------------------------


def planned(num_processes: int | None = None) -> int:
    return plan_launch(LaunchSpec(train, num_processes=num_processes, backend="cpu")).num_processes


def test_one_worker_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NBLAUNCH_NUM_PROCESSES", raising=False)
    assert planned() == backends.choose("cpu").device_count()


def test_the_environment_sets_the_default_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBLAUNCH_NUM_PROCESSES", "3")
    assert planned() == 3
    assert planned(5) == 5


@pytest.mark.parametrize("text", ["0", "-2", "two"])
def test_an_invalid_number_in_the_environment_is_rejected(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("NBLAUNCH_NUM_PROCESSES", text)
    with pytest.raises(ValueError, match=f"NBLAUNCH_NUM_PROCESSES='{text}' must be a whole number of"):
        planned()


# --- devices that kept workers have ----------------------------------------------------------------------------------


class _Kept(KeptFailure):
    def _release(self) -> None:
        """Do nothing, because no workers are really kept."""


@pytest.mark.parametrize("has_devices", [False, True])
def test_kept_workers_are_released_for_their_devices(
    monkeypatch: pytest.MonkeyPatch, has_devices: bool
) -> None:
    kept = _Kept(DebugClient({}), 0)

    def problem(backend: CpuBackend) -> str | None:
        return "taken" if has_devices and not kept.is_released else None

    monkeypatch.setattr(CpuBackend, "launch_problem", problem)
    plan_launch(LaunchSpec(train, num_processes=1, backend="cpu"))
    assert kept.is_released is has_devices
    kept.release()


def test_devices_in_use_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuBackend, "launch_problem", lambda backend: "taken by others")
    with pytest.raises(LaunchError, match="taken by others"):
        plan_launch(LaunchSpec(train, num_processes=1, backend="cpu"))
