"""Checks for gradients that are never cleared, never computed, or clipped after the step."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from nblaunch.training.checks.check import Check, Prepared, Report, Streaks, parameters_of
from nblaunch.training.collectives import dtensor

_NUM_SAMPLED = 3  # parameters whose gradients are examined
_NUM_UNCLEARED = 2  # steps in a row
_NUM_EMPTY = 3  # steps in a row


@dataclass(eq=False)
class _LastStep:
    """The state of an optimizer's gradients since its last step.

    Args:
        sample: some parameters that had a gradient in the step, with these gradients.
        is_cleared: whether the gradients were gone, or zero, before a backward pass.
        is_added_to: whether there was a backward pass.
    """

    sample: list[tuple[torch.nn.Parameter, TensorWeakRef]]
    is_cleared: bool = False
    is_added_to: bool = False

    def look(self) -> None:
        """Examine the gradients before a backward pass."""
        self.is_added_to = True
        # Checked only here: an optimizer may keep its gradients until it is used again, as in a GAN.
        self.is_cleared = self.is_cleared or not all(_has_gradient(parameter) for parameter, _ in self.sample)

    @property
    def is_replaced(self) -> bool:
        """Whether a backward pass that was not examined has replaced the gradients."""
        return any(gradient() is not parameter.grad for parameter, gradient in self.sample)


class UnclearedGradients(Check):
    """An optimizer never clears its gradients, and backward passes add to the gradients of all earlier steps."""

    name = "gradients_not_cleared"

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self.begin_window()

    def begin_window(self) -> None:
        self._last: weakref.WeakKeyDictionary[Any, _LastStep] = weakref.WeakKeyDictionary()
        self._streaks = Streaks()

    def before_backward(self, prepared: Prepared, loss: torch.Tensor) -> None:
        for last in self._last.values():
            last.look()

    def before_step(self, prepared: Prepared, optimizer: torch.optim.Optimizer) -> None:
        last = self._last.get(optimizer)
        # An unprepared optimizer may have backward passes that are not examined.
        is_prepared = any(one.optimizer is optimizer for one in prepared.optimizers)
        if is_prepared and last is not None and last.is_added_to and self._is_uncleared(optimizer, last):
            self.report(
                f"gradients of the {type(optimizer).__name__} are never cleared: each step uses the sum "
                "of the gradients of all steps before",
                "Call optimizer.zero_grad() after optimizer.step()",
            )
        with_gradients = filter(_has_gradient, parameters_of(optimizer))
        sample = [
            (one, TensorWeakRef(one.grad))
            for one in islice(with_gradients, _NUM_SAMPLED)
            if one.grad is not None
        ]
        if sample:
            self._last[optimizer] = _LastStep(sample)

    def _is_uncleared(self, optimizer: torch.optim.Optimizer, last: _LastStep) -> bool:
        return self._streaks.add(optimizer, not (last.is_cleared or last.is_replaced)) >= _NUM_UNCLEARED


def _has_gradient(parameter: torch.nn.Parameter) -> bool:
    """Return whether a parameter has a gradient that is not zero everywhere; waits for the device."""
    return parameter.grad is not None and bool(dtensor.local(parameter.grad).any())


class ForeignParameters(Check):
    """An optimizer steps without any gradients, because its parameters belong to no trained model."""

    name = "optimizer_without_gradients"

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self.begin_window()

    def begin_window(self) -> None:
        self._streaks = Streaks()

    def before_step(self, prepared: Prepared, optimizer: torch.optim.Optimizer) -> None:
        is_empty = all(parameter.grad is None for parameter in parameters_of(optimizer))
        if self._streaks.add(optimizer, is_empty) == _NUM_EMPTY:
            self.report(
                f"no parameter of the {type(optimizer).__name__} has a gradient, so its steps change nothing",
                "The optimizer was built from another model's parameters, or before the model or its layers were "
                "replaced: build it from model.parameters() of the model that you train",
            )


class LateClipping(Check):
    """Gradients are clipped after the step that used them, and before the next backward pass."""

    name = "clipping_after_step"

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self.begin_window()

    def begin_window(self) -> None:
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()

    def before_backward(self, prepared: Prepared, loss: torch.Tensor) -> None:
        self._stepped.clear()

    def before_step(self, prepared: Prepared, optimizer: torch.optim.Optimizer) -> None:
        self._stepped.add(optimizer)

    def before_clip(self, prepared: Prepared, optimizers: Sequence[Any]) -> None:
        if optimizers and all(one.optimizer in self._stepped for one in optimizers):
            self.report(
                "gradients are clipped after optimizer.step() has used them, which has no effect",
                "Clip between accelerator.backward(loss) and optimizer.step()",
            )
