"""What a check is: :class:`Check`, with the moments of a training loop at which it may look."""

from __future__ import annotations

import weakref
from abc import ABC
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch

Report = Callable[..., None]
"""``report(check, problem, remedy, value, judged_by)``: sends what a check has seen."""


class Prepared(Protocol):
    """What checks look at: the objects that an Accelerator has prepared."""

    models: Any
    optimizers: Any
    schedulers: Any
    accumulation: Any
    precision: Any
    shared: Any
    strategy: Any


class Check(ABC):
    """Looks for one kind of error. Its methods are called in the steps at which the checks look, and do nothing here.

    Args:
        report: sends what the check has seen.
    """

    name: ClassVar[str]
    """Name of the check, by which users silence it."""

    is_hint: ClassVar[bool] = False
    """Whether what it sees may be meant: then it is shown on request only."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def begin_window(self) -> None:
        """Forget the last steps that were looked at: others have passed since."""

    def before_backward(self, prepared: Prepared, loss: torch.Tensor) -> None:
        """Look before a backward pass from ``loss``."""

    def before_step(self, prepared: Prepared, optimizer: torch.optim.Optimizer) -> None:
        """Look before a step of an optimizer that :mod:`torch` itself takes, prepared or not."""

    def before_clip(self, prepared: Prepared, optimizers: Sequence[Any]) -> None:
        """Look before gradients of prepared ``optimizers`` are clipped."""

    def after_evaluation(self, prepared: Prepared) -> None:
        """Look after a loop over a prepared loader that has trained nothing."""

    def report(self, problem: str, remedy: str, *, value: Any = None, judged_by: str = "itself") -> None:
        """Send what this rank has seen, with the arguments of :class:`~nblaunch.events.Observation`."""
        self._report(self, problem, remedy, value, judged_by)


class Streaks:
    """For each optimizer, how many of its steps in a row had something wrong."""

    def __init__(self) -> None:
        self._lengths: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def add(self, optimizer: torch.optim.Optimizer, is_wrong: bool) -> int:
        """Count a step; return the length of the streak that it is part of, 0 if it was right."""
        length = self._lengths.get(optimizer, 0) + 1 if is_wrong else 0
        self._lengths[optimizer] = length
        return length


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return all parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
