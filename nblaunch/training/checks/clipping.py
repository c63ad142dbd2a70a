"""Checks for gradients that are clipped after the step, or while they still contain fp16's loss scale.

The Accelerator reports its own clipping to the watch. Users also call ``torch.nn.utils.clip_grad_norm_`` and
``clip_grad_value_``, often under a name that they imported earlier, so replacing the functions would not
reach every call. Both functions first group the gradients by device, with a helper that torch looks up at
each call. The watch observes that helper in the steps that it examines.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils import clip_grad

from nblaunch.training.checks.check import Check, Prepared, parameters_of

_MEASURES_FROM = 1e6
"""A ``max_norm`` of at least this size limits nothing: users pass it, or infinity, to measure the norm."""

_HELPER = "_group_tensors_by_device_and_dtype"
_CLIPPING = {"_clip_grads_with_norm_", "clip_grad_norm_", "clip_grad_value_"}
"""torch functions that call the helper to change gradients; in older releases, ``clip_grad_norm_`` itself does."""


class LateClipping(Check):
    """Gradients are clipped after the step that used them, and before the next backward pass."""

    name = "clipping_after_step"

    def begin_window(self) -> None:
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()

    def before_backward(self, prepared: Prepared, loss: torch.Tensor, options: Mapping[str, Any]) -> None:
        self._stepped.clear()

    def before_step(self, prepared: Prepared, optimizer: torch.optim.Optimizer) -> None:
        self._stepped.add(optimizer)

    def before_clip(self, prepared: Prepared, gradients: Sequence[torch.Tensor], by_torch: bool) -> None:
        used = {id(parameter.grad) for optimizer in self._stepped for parameter in parameters_of(optimizer)}
        if gradients and all(id(gradient) in used for gradient in gradients):
            self.report(
                "gradients are clipped after optimizer.step() has used them, which has no effect",
                "Clip between accelerator.backward(loss) and optimizer.step()",
            )


class ScaledClipping(Check):
    """A torch function clips fp16 gradients that still contain the loss scale."""

    name = "clipping_scaled_gradients"

    def before_clip(self, prepared: Prepared, gradients: Sequence[torch.Tensor], by_torch: bool) -> None:
        scaler = prepared.precision.scaler
        if not by_torch or scaler is None or scaler.get_scale() == 1.0:
            return
        scaled = {
            id(parameter.grad)
            for wrapper in prepared.optimizers
            if prepared.precision.has_scaled_gradients(wrapper.optimizer)
            for parameter in parameters_of(wrapper.optimizer)
        }
        if any(id(gradient) in scaled for gradient in gradients):
            self.report(
                "a torch function clips fp16 gradients that still contain the loss scale of "
                f"{scaler.get_scale():g}, so it clips almost everything",
                "Call accelerator.clip_grad_norm_(model.parameters(), max_norm), which removes the scale first",
            )


def measures_only(max_norm: Any) -> bool:
    """Return whether a call that clips to ``max_norm`` only measures the norm."""
    return max_norm is not None and float(max_norm) >= _MEASURES_FROM


def observe_torch(note: Callable[[Sequence[torch.Tensor]], object]) -> Callable[[], None]:
    """Call ``note`` with the gradients that torch is about to clip; return a function that ends the observation."""
    group = getattr(clip_grad, _HELPER, None)
    if group is None:
        return lambda: None

    def note_and_group(lists: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            caller = sys._getframe(1)
            if caller.f_code.co_name in _CLIPPING and not measures_only(caller.f_locals.get("max_norm")):
                note(lists[0])
        return group(lists, *args, **kwargs)

    def end() -> None:
        if getattr(clip_grad, _HELPER) is note_and_group:
            setattr(clip_grad, _HELPER, group)

    setattr(clip_grad, _HELPER, note_and_group)
    return end
