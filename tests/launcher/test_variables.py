"""Environment variables with a text that they can't have: refused before anything is started."""

from __future__ import annotations

import pytest

from nblaunch import env
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
