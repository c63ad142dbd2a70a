"""Checks for gradients that are never cleared, are never computed, overflow in every step, or are clipped wrongly."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.utils.weak import TensorWeakRef

from nblaunch import formatting
from nblaunch.training.checks import Check, Prepared, Streaks, parameters_of
from nblaunch.training.collectives import dtensor
from nblaunch.training.models import bare_module

_NUM_SAMPLED = 3  # parameters whose gradients are examined
_NUM_ELEMENTS = 8  # of each of these gradients
_NUM_UNCLEARED = 2  # steps in a row
_NUM_EMPTY = 3  # steps in a row
_NUM_OVERFLOWS = 10  # consecutive steps; a scaler that starts too high needs a few
_MAX_NAMED = 4


@dataclass(eq=False)
class _LastStep:
    """The state of an optimizer's gradients since its last step.

    Args:
        sample: some parameters that had a gradient in the step, along with those gradients and a few of their
            elements.
        is_cleared: whether, before a backward pass, the loop had removed, zeroed or changed the gradients.
        is_added_to: whether there was a backward pass.
    """

    sample: list[tuple[torch.nn.Parameter, TensorWeakRef, torch.Tensor]]
    is_cleared: bool = False
    is_added_to: bool = False

    def look(self) -> None:
        """Examine the gradients before a backward pass."""
        # Check only here, because an optimizer may keep its gradients until it is used again, as in a GAN.
        self.is_cleared = self.is_cleared or not all(
            _has_gradient(parameter) for parameter, *_ in self.sample
        )
        if not self.is_added_to:  # a loop may scale gradients down instead of clearing them
            self.is_cleared = self.is_cleared or any(
                not torch.equal(_first_elements(parameter), elements)
                for parameter, _, elements in self.sample
            )
        self.is_added_to = True

    @property
    def is_replaced(self) -> bool:
        """Whether a backward pass that was not examined has replaced the gradients."""
        return any(gradient() is not parameter.grad for parameter, gradient, _ in self.sample)


class UnclearedGradients(Check):
    """An optimizer never clears its gradients, and backward passes add to the gradients of all earlier steps."""

    name = "gradients_not_cleared"

    def begin_window(self) -> None:
        self._last: weakref.WeakKeyDictionary[Any, _LastStep] = weakref.WeakKeyDictionary()
        self._streaks = Streaks()

    def before_backward(self, prepared: Prepared, loss: torch.Tensor, options: Mapping[str, Any]) -> None:
        for last in self._last.values():
            last.look()

    def before_step(self, prepared: Prepared, optimizer: torch.optim.Optimizer) -> None:
        last = self._last.get(optimizer)
        # For an unprepared optimizer, the watch does not examine every backward pass.
        is_prepared = any(wrapper.optimizer is optimizer for wrapper in prepared.optimizers)
        if is_prepared and last is not None and last.is_added_to and self._is_uncleared(optimizer, last):
            self.report(
                f"gradients of the {type(optimizer).__name__} are never cleared: each step uses the sum "
                "of the gradients of all previous steps",
                "Call optimizer.zero_grad() after optimizer.step()",
            )
        with_gradients = filter(_has_gradient, parameters_of(optimizer))
        sample = [
            (parameter, TensorWeakRef(parameter.grad), _first_elements(parameter).clone())
            for parameter in islice(with_gradients, _NUM_SAMPLED)
            if parameter.grad is not None
        ]
        if sample:
            self._last[optimizer] = _LastStep(sample)

    def _is_uncleared(self, optimizer: torch.optim.Optimizer, last: _LastStep) -> bool:
        return self._streaks.add(optimizer, not (last.is_cleared or last.is_replaced)) >= _NUM_UNCLEARED


def _first_elements(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return a view of a few elements of a parameter's gradient, which must exist."""
    assert parameter.grad is not None, "only parameters with gradients are sampled"
    elements: torch.Tensor = dtensor.local(parameter.grad).detach().reshape(-1)[:_NUM_ELEMENTS]
    return elements


def _has_gradient(parameter: torch.nn.Parameter) -> bool:
    """Wait for the device, and return whether a parameter has a gradient that is not zero everywhere."""
    return parameter.grad is not None and bool(dtensor.local(parameter.grad).any())


class ForeignParameters(Check):
    """An optimizer updates parameters that are not part of a trained model, such as a replaced layer's."""

    name = "optimizer_without_gradients"

    def begin_window(self) -> None:
        self._empty, self._partly_foreign = Streaks(), Streaks()
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._is_any_trained = False
        self._num_backwards = 0
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def before_backward(self, prepared: Prepared, loss: torch.Tensor, options: Mapping[str, Any]) -> None:
        self._num_backwards += 1

    def before_step(self, prepared: Prepared, optimizer: torch.optim.Optimizer) -> None:
        # Ignore a step without a new backward pass: it may only serve to advance a learning rate schedule.
        if self._seen.get(optimizer, 0) == self._num_backwards:
            return
        self._seen[optimizer] = self._num_backwards
        self._stepped.add(optimizer)
        parameters = parameters_of(optimizer)
        without = [parameter for parameter in parameters if parameter.grad is None]
        is_empty = len(without) == len(parameters)
        self._is_any_trained = self._is_any_trained or not is_empty
        # One optimizer's layers may be frozen for a time while another optimizer's layers are trained.
        is_frozen = self._is_any_trained and not any(parameter.requires_grad for parameter in parameters)
        if self._empty.add(optimizer, is_empty and not is_frozen) == _NUM_EMPTY:
            self.report(
                f"no parameter of the {type(optimizer).__name__} has a gradient, so its steps change nothing",
                "Build the optimizer from the parameters of the model that you train, after you have replaced layers. "
                "Call zero_grad() after step() or before backward(), and do not detach the loss",
            )
        left_out = [] if is_empty or not without else self._left_out(prepared, optimizer, without)
        if self._partly_foreign.add(optimizer, bool(left_out)) == _NUM_EMPTY:
            self.report(
                f"{formatting.first(left_out, _MAX_NAMED)} of the trained model belong to no optimizer, and the "
                f"{type(optimizer).__name__} instead has parameters that belong to no model and never get a gradient",
                "Build the optimizer from model.parameters() after you replace layers, not before",
            )

    def _left_out(
        self, prepared: Prepared, optimizer: torch.optim.Optimizer, without: Sequence[torch.nn.Parameter]
    ) -> list[str]:
        """Return the names of parameters whose gradients no optimizer uses, if the optimizer has other parameters in
        their place.
        """
        named = {
            id(parameter): (name, parameter)
            for model in map(bare_module, prepared.models)
            for name, parameter in model.named_parameters()
        }
        strays = [parameter for parameter in without if id(parameter) not in named]
        if not strays:
            return []
        optimizers = {optimizer, *self._stepped, *(wrapper.optimizer for wrapper in prepared.optimizers)}
        stepped = {id(parameter) for each in optimizers for parameter in parameters_of(each)}
        left_out = {
            name: parameter
            for key, (name, parameter) in named.items()
            if key not in stepped and parameter.grad is not None
        }
        # A layer that replaces another one has the same kinds of parameters (weights and biases).
        is_alike = sorted(map(torch.Tensor.dim, strays)) == sorted(map(torch.Tensor.dim, left_out.values()))
        return list(left_out) if is_alike else []


class CollapsedScale(Check):
    """fp16 gradients overflow in every step: the scaler keeps halving its scale, and skips all steps."""

    name = "loss_scale_collapsed"

    def begin_window(self) -> None:
        self._scale = 0.0
        self._num_overflows = 0

    def before_backward(self, prepared: Prepared, loss: torch.Tensor, options: Mapping[str, Any]) -> None:
        scaler = prepared.precision.scaler
        if scaler is None:
            return
        scale = scaler.get_scale()
        self._num_overflows += scale < self._scale
        self._scale = scale
        if self._num_overflows == _NUM_OVERFLOWS:
            self.report(
                f"fp16 gradients overflow in every step, and {_NUM_OVERFLOWS} steps in a row were skipped: the loss "
                f"scale has fallen to {scale:g}",
                "Look for a loss or an activation that is not finite, or use mixed_precision='bf16'",
            )

    def before_step(self, prepared: Prepared, optimizer: torch.optim.Optimizer) -> None:
        self._num_overflows = 0  # the scaler let the optimizer step


# --- clipping ---------------------------------------------------------------------------------------------------------

# The Accelerator reports its own clipping to the watch. Users also call ``torch.nn.utils.clip_grad_norm_`` and
# ``clip_grad_value_``, often under a name that they imported earlier, so replacing the functions would not reach every
# call. Both functions first group the gradients by device, with a helper that torch looks up at each call. The watch
# observes that helper in the steps that it examines.

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
