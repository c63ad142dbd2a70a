"""Environment variables: of the kernel, refused before anything is started where they can't be; and of workers."""

from __future__ import annotations

import os

import pytest

from nblaunch import env, notebook_launcher
from nblaunch.launcher.plan import plan_launch
from nblaunch.spec import LaunchSpec


def train() -> None:
    """Never called here: the launch is only planned."""


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
