"""Checks for errors in a training loop that raise no exception: training continues, but its result is wrong.

    watch.py       runs the checks in the first steps, and in a few later ones
    gradients.py   gradients that are never cleared, never computed, overflow in every step, or are clipped too late
                   or while they still contain fp16's scale
    schedules.py   learning rates of 0, schedulers that advance between steps
    replicas.py    ranks whose gradients, weights or statistics differ
    data.py        loaders that were not prepared, or whose processes draw the same random numbers
    hints.py       behaviour that is often a mistake but may be intended; shown on request

A check sends an :class:`~nblaunch.events.Observation`. The launcher compares the observations from all ranks, and
reports each error once, with the ranks, the line and advice (:mod:`nblaunch.diagnosis.silent_errors`). Ranks do not
communicate for a check, and steps without checks take no extra time. :class:`Check` is the interface of a check, with
the points in a training loop at which it is called.
"""

from __future__ import annotations

import weakref
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

Prepared = Any
"""The Accelerator's :class:`~nblaunch.training.prepare.Preparer`, which holds the objects that checks examine."""


class Check(ABC):
    """Base class for checks, each of which looks for one kind of error.

    The watch calls a check's methods in the steps that it examines. In this class, the methods do nothing.
    """

    name: ClassVar[str]
    """Name of the check, which users specify to silence it."""

    is_hint: ClassVar[bool] = False
    """Whether the observed behaviour may be intended. Hints are shown only on request."""

    send: Callable[..., None]
    """``send(check, problem, advice, value, judged_by, step)`` sends an observation; the watch sets it."""

    def begin_window(self) -> None:
        """Forget the steps that were examined before, because other steps have passed since.

        The watch calls this before any other method, and whenever it begins to examine steps again.
        """

    def before_backward(self, prepared: Prepared, loss: torch.Tensor, options: Mapping[str, Any]) -> None:
        """Look for the error before a backward pass from ``loss``; ``options`` are for ``accelerator.backward``."""

    def before_step(self, prepared: Prepared, optimizer: torch.optim.Optimizer) -> None:
        """Look for the error before a step of a torch optimizer, whether or not it is prepared."""

    def before_clip(self, prepared: Prepared, gradients: Sequence[torch.Tensor], by_torch: bool) -> None:
        """Look for the error before ``gradients`` are clipped, either by torch or by the Accelerator."""

    def before_loop(self, prepared: Prepared) -> None:
        """Look for the error before a loop over a prepared loader."""

    def after_evaluation(self, prepared: Prepared) -> None:
        """Look for the error after a loop over a prepared loader in which no optimizer stepped."""

    def before_show(self, prepared: Prepared, shown: Any) -> None:
        """Look for the error before ``shown`` is printed or logged, if an evaluation ran without a collective."""

    def report(
        self,
        problem: str,
        advice: str,
        *,
        value: Any = None,
        judged_by: str = "itself",
        step: int | None = None,
    ) -> None:
        """Send an observation from this rank, with the arguments of :class:`~nblaunch.events.Observation`.

        Pass ``step`` if ranks do not step together; None: the number of steps that this rank's optimizers have taken.
        """
        self.send(self, problem, advice, value, judged_by, step)


class Streaks:
    """Counts, for each optimizer, how many consecutive steps were wrong."""

    def __init__(self) -> None:
        self._lengths: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def add(self, optimizer: torch.optim.Optimizer, is_wrong: bool) -> int:
        """Count a step; return the number of consecutive wrong steps so far, 0 if this step was right."""
        length = self._lengths.get(optimizer, 0) + 1 if is_wrong else 0
        self._lengths[optimizer] = length
        return length


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return all parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
