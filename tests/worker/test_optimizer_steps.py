"""An interrupt in an optimizer step is raised when the step ends, or when it takes too long."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from nblaunch.wire.board import private_slot
from nblaunch.worker import optimizer_steps
from nblaunch.worker.optimizer_steps import OptimizerSteps


@pytest.fixture
def steps() -> Iterator[OptimizerSteps]:
    steps = OptimizerSteps()
    module: Any = sys.modules["torch.optim.optimizer"]
    hooks = module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks
    known = [dict(one) for one in hooks]
    steps.watch(module, private_slot())

    def on_signal(number: int, frame: Any) -> None:
        if not steps.is_held(frame):
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, on_signal)
    yield steps
    signal.signal(signal.SIGINT, before)
    for one, were in zip(hooks, known, strict=True):
        for key in one.keys() - were.keys():
            del one[key]


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Adding(torch.optim.SGD):
    """An optimizer that adds 1 to its parameter, calls a function, and adds 1 again."""

    def __init__(self, between: Callable[[], object] = lambda: None) -> None:
        self.parameter = torch.nn.Parameter(torch.zeros(1))
        self.between = between
        super().__init__([self.parameter])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.parameter.data += 1
        self.between()
        self.parameter.data += 1


def test_an_interrupt_in_a_step_is_raised_at_its_end(steps: OptimizerSteps) -> None:
    optimizer = Adding(interrupt)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert (optimizer.parameter.item(), steps.num_done, steps.is_cut) == (2.0, 1, False)
    optimizer.between = lambda: None
    optimizer.step()  # it was raised once
    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert steps.num_done == 2


def test_a_nested_step_is_part_of_the_outer_one(steps: OptimizerSteps) -> None:
    inner = Adding(interrupt)
    outer = Adding(inner.step)
    with pytest.raises(KeyboardInterrupt):
        outer.step()
    assert (inner.parameter.item(), outer.parameter.item(), steps.num_done) == (2.0, 2.0, 1)


def test_a_step_that_raised_does_not_hide_later_ones(steps: OptimizerSteps) -> None:
    with pytest.raises(ZeroDivisionError):
        Adding(lambda: 1 // 0).step()
    Adding().step()
    assert steps.num_done == 1


def test_a_step_that_takes_too_long_is_cut(steps: OptimizerSteps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_steps, "HOLD_S", 0.01)

    def stay() -> None:
        interrupt()
        signal.pause()  # until the reminder

    optimizer = Adding(stay)
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    assert (optimizer.parameter.item(), steps.num_done, steps.is_cut) == (1.0, 0, True)
    Adding().step()
    assert not steps.is_cut
