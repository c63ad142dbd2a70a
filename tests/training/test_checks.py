"""Checks of training loops in a process without a launcher. tests/integration tests them on ranks."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nblaunch import Accelerator, env

ROOT = Path(__file__).parents[2]


def _train(num_steps: int, after_step: Callable[[Accelerator, nn.Module], object]) -> None:
    accelerator = Accelerator()
    layer = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), 0.1))
    for _ in range(num_steps):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        after_step(accelerator, model)
        optimizer.zero_grad()


def _clip(accelerator: Accelerator, model: nn.Module) -> None:
    accelerator.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.usefixtures("unwatched")
def test_a_script_without_a_launcher_is_warned_once_at_its_line() -> None:
    with pytest.warns(UserWarning, match="NBLAUNCH_CHECKS=-clipping_after_step") as caught:
        _train(20, _clip)
    assert [one.filename for one in caught] == [__file__]


@pytest.mark.usefixtures("unwatched")
def test_a_warning_that_filters_make_an_error_is_raised() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="clipping_after_step"):
            _train(20, _clip)


@pytest.mark.alarms("clipping_after_step")
def test_observations_without_a_launcher_are_alarms_of_a_test() -> None:
    _train(20, _clip)


def calls_of_checks(num_steps: int) -> list[int]:
    """Return the number of check functions that each step calls; the first number includes the preparation."""
    calls = [0]

    def count(frame: Any, event: str, argument: Any) -> None:
        is_check = "/training/checks/" in frame.f_code.co_filename and frame.f_code.co_name != "call_watch"
        calls[-1] += event == "call" and is_check

    sys.setprofile(count)
    try:
        _train(num_steps, lambda *_: calls.append(0))
    finally:
        sys.setprofile(None)
    return calls


def test_steps_between_the_looks_run_no_check() -> None:
    """This runs in a fresh process, where no other test's Accelerator still watches all optimizers."""
    program = "from tests.training.test_checks import calls_of_checks; print(*calls_of_checks(16))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    calls = list(map(int, done.stdout.split()))
    assert all(calls[1:10])
    assert not any(calls[11:16])


def test_an_invalid_checks_setting_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBLAUNCH_CHECKS", "zero_learning_rate")
    with pytest.raises(ValueError, match="NBLAUNCH_CHECKS"):
        env.check()
