"""How many workers a launch has without the argument: one per device, or as the environment says."""

from __future__ import annotations

import pytest

from nblaunch import backends
from nblaunch.launcher.plan import plan_launch
from nblaunch.spec import LaunchSpec


def train() -> None:
    """Never called here: the launch is only planned."""


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
