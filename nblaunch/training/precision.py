"""In which number format the forward pass computes, and what that asks of backward, clipping and step.

:class:`Precision` is full precision: every method does nothing beyond plain PyTorch. The others change only what they
must. Which formats a device can do is decided by the backend; which one is used, step by step:

    argument ──> ``StrategyPlugin.precision_name`` ──> ``arguments.resolve_precision`` ──> :func:`make`
             ──> ``Strategy.adapt_precision``

:class:`LossScaling` is the one gradient scaler of fp16, which several optimizers share.
torch's scaler wants one ``update`` per round of backward passes and steps, after the steps of all optimizers: it may
change the scale, which those that have not stepped yet still need, and it forgets whose gradients were unscaled. When
a round is over, is decided here:

    backward   unscale(a) unscale(b)   step(a)   step(b)   -> update
    backward   unscale(a)   step(a)   backward   ...       -> update before the second backward
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from nblaunch.backends.base import Backend
from nblaunch.errors import warn
from nblaunch.spec import MIXED_PRECISIONS
from nblaunch.training.collectives import dtensor, nested
from nblaunch.training.float8 import AORecipeKwargs
from nblaunch.training.joining import current_topology
from nblaunch.training.options import AutocastKwargs, GradScalerKwargs, check_choice


class Precision:
    """Full precision: nothing is converted, nothing is scaled."""

    name = "no"
    dtype: torch.dtype | None = None

    def __init__(self, backend: Backend, autocast: AutocastKwargs | None = None) -> None:
        self._backend = backend
        self._options = autocast or AutocastKwargs()

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler; None where losses are not scaled."""
        return None

    def replace_handlers(self, handlers: Mapping[type, Any]) -> None:
        """Use handlers that the user has assigned to the Accelerator, from now on. By type: all of them."""
        self._options = handlers.get(AutocastKwargs) or AutocastKwargs()

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        """Take notice of an optimizer that was prepared."""

    def autocast(self, options: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Run the block, outside a prepared model's forward, in this precision. ``options`` beat the constructor's."""
        if self.dtype is None:
            return nullcontext()
        options = options or self._options
        return self._backend.autocast(
            self.dtype, enabled=options.enabled, cache_enabled=options.cache_enabled
        )

    def convert_layers(self, model: torch.nn.Module, is_sharded: bool) -> None:
        """Replace layers by those that compute in this precision, before :meth:`prepare_forward`.

        Args:
            model: the user's own module.
            is_sharded: its weights will be sharded over ranks.
        """

    def prepare_forward(self, model: torch.nn.Module) -> None:
        """Make ``model.forward`` compute in this precision. An earlier preparation is undone first."""
        restore_forward(model)
        if self.dtype is not None:
            wrapped = AutocastForward(model, self)
            # Past Module.__setattr__, which is for parameters, buffers and submodules.
            model.__dict__.update(_original_forward=wrapped.original, forward=wrapped)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Call ``loss.backward(**kwargs)``, scaled where the precision needs it."""
        loss.backward(**kwargs)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the gradients of ``optimizer`` to their true size, before they are clipped or looked at."""

    def forget_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Take notice that the gradients of ``optimizer`` were cleared."""

    def step(self, optimizer: torch.optim.Optimizer, closure: Any = None) -> bool:
        """Step ``optimizer``. Returns whether the step was skipped because gradients overflowed."""
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)
        return False


class Bf16Precision(Precision):
    """Autocast to bfloat16. Its range is that of fp32, so gradients need no scaling."""

    name = "bf16"
    dtype = torch.bfloat16


class Fp8Precision(Bf16Precision):
    """Linear layers compute in 8 bits, by torchao; all else as in bf16."""

    name = "fp8"

    def __init__(
        self, backend: Backend, recipe: AORecipeKwargs, autocast: AutocastKwargs | None = None
    ) -> None:
        super().__init__(backend, autocast)
        self.recipe = recipe

    def convert_layers(self, model: torch.nn.Module, is_sharded: bool) -> None:
        self.recipe.convert(model, is_sharded)


class DeviceBf16Precision(Precision):
    """The device represents fp32 as bfloat16 by itself; nothing is left to do here."""

    name = "bf16"


class ReplacedFp16Precision(Precision):
    """Full precision, where it takes the place of fp16."""

    name = "fp16"


class Fp16Precision(Precision):
    """Autocast to float16, with the loss scaled so that small gradients don't vanish."""

    name = "fp16"
    dtype = torch.float16

    def __init__(
        self,
        backend: Backend,
        autocast: AutocastKwargs | None = None,
        scaling: GradScalerKwargs | None = None,
    ) -> None:
        super().__init__(backend, autocast)
        self._scaling = LossScaling(backend.grad_scaler(**(scaling or GradScalerKwargs()).to_kwargs()))

    @property
    def scaler(self) -> torch.amp.GradScaler:
        return self._scaling.scaler

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        self._scaling.register(optimizer)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        self._scaling.backward(loss, **kwargs)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        self._scaling.unscale(optimizer)

    def forget_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        self._scaling.forget(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, closure: Any = None) -> bool:
        return self._scaling.step(optimizer, closure)


class AutocastForward:
    """A model's ``forward`` under autocast, with outputs in fp32 so that losses are computed in full.

    An object rather than a closure: deep copies of the model (averaged weights, say) then call *their* forward.
    """

    def __init__(self, model: torch.nn.Module, precision: Precision) -> None:
        self.original = model.forward
        self.precision = precision
        self.had_own = "forward" in model.__dict__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision.autocast():
            output = self.original(*args, **kwargs)
        return nested.convert_to_fp32(output)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``model_forward`` with outputs in fp32, as forwards in half precision have them after ``prepare``."""

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return nested.convert_to_fp32(model_forward(*args, **kwargs))

    return forward


def restore_forward(model: torch.nn.Module) -> None:
    """Undo :meth:`Precision.prepare_forward`; does nothing where it was not applied."""
    wrapped = model.__dict__.get("forward")
    if not isinstance(wrapped, AutocastForward):
        return
    del model.forward
    if wrapped.had_own:
        model.forward = wrapped.original
    model.__dict__.pop("_original_forward", None)


def resolve(name: Any, backend: Backend, recipe: AORecipeKwargs | None = None) -> str:
    """Return ``name``, checked: it exists, and the device can do it.

    Args:
        name: of a precision.
        backend: the device family.
        recipe: of fp8, which may be one for any device.

    Raises:
        ValueError: unknown, or impossible on this device, with the reason.
    """
    name = str(getattr(name, "value", name)).lower()
    check_choice("mixed_precision", name, MIXED_PRECISIONS)
    is_emulated = name == "fp8" and recipe is not None and recipe.is_emulated
    if not is_emulated:
        backend.check_precision(name)
    return name


def make(name: str, backend: Backend, handlers: Mapping[type, Any]) -> Precision:
    """Return the precision called ``name``, which :func:`resolve` has checked.

    Args:
        name: of the precision.
        backend: the device family.
        handlers: may have settings of the gradient scaler, of autocast and of fp8, by type.
    """
    autocast = handlers.get(AutocastKwargs)
    if name == "fp16" and (reason := backend.precision_refusal(name)) is not None:
        if current_topology().rank == 0:
            warn(f"mixed_precision='fp16': {reason}")
        return ReplacedFp16Precision(backend, autocast)
    if name == "fp16":
        return Fp16Precision(backend, autocast, handlers.get(GradScalerKwargs))
    if name == "fp8":
        return Fp8Precision(backend, handlers.get(AORecipeKwargs) or AORecipeKwargs(), autocast)
    if name == "bf16":
        return (DeviceBf16Precision if backend.represents_in_bf16() else Bf16Precision)(backend, autocast)
    return Precision(backend, autocast)


class LossScaling:
    """Scales losses, and unscales the gradients of each optimizer once per round.

    Args:
        scaler: torch's; what it is asked for directly is right, too, as long as it is read by :attr:`scaler`.
    """

    def __init__(self, scaler: torch.amp.GradScaler) -> None:
        self._scaler = scaler
        self._optimizers: weakref.WeakValueDictionary[int, torch.optim.Optimizer] = (
            weakref.WeakValueDictionary()
        )
        self._unscaled: set[int] = set()  # ids of optimizers; their gradients have their true size
        self._done: set[int] = set()  # those that stepped in this round, or whose gradients were cleared
        self._steps_taken = 0

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """torch's scaler, with the scale of the next round where this one has ended."""
        if not self._waiting():
            self._end_round()
        return self._scaler

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        """Take part in rounds, from now on, with an optimizer that may step after others."""
        if self._optimizers.get(id(optimizer)) is not optimizer:
            self._unscaled.discard(id(optimizer))  # what is known is of another one, which is gone
            self._done.discard(id(optimizer))
            self._optimizers[id(optimizer)] = optimizer

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Compute scaled gradients.

        Raises:
            RuntimeError: gradients that were unscaled would be mixed with them, or were.
        """
        for optimizer in list(self._optimizers.values()):
            if not _has_gradients(optimizer):
                self.forget(optimizer)
        if self._done and self._unscaled:
            raise RuntimeError(_MIXED.format("has not stepped since"))
        self._end_round()
        before = {key: _versions(self._optimizers[key]) for key in self._unscaled if key in self._optimizers}
        self._scaler.scale(loss).backward(**kwargs)
        if any(_versions(self._optimizers[key]) != versions for key, versions in before.items()):
            raise RuntimeError(_MIXED.format("was given more of them by backward before it stepped"))

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the gradients of ``optimizer`` to their true size. A second call in a round does nothing."""
        self.register(optimizer)
        if id(optimizer) in self._done:
            self._end_round()
        # The scaler refuses to unscale twice; clipping by norm and then by value is a fair thing to do.
        if id(optimizer) not in self._unscaled and _has_gradients(optimizer):
            self._scaler.unscale_(optimizer)
            self._unscaled.add(id(optimizer))

    def step(self, optimizer: torch.optim.Optimizer, closure: Any = None) -> bool:
        """Step ``optimizer``. Returns whether it was left out because gradients overflowed."""
        self.register(optimizer)
        if id(optimizer) in self._done:
            self._end_round()
        before = self._steps_taken
        handle = optimizer.register_step_pre_hook(self._count_step)
        try:
            if closure is None:
                self._scaler.step(optimizer)
            else:
                self._scaler.step(optimizer, closure)
        finally:
            handle.remove()
        self._unscaled.discard(id(optimizer))
        self._done.add(id(optimizer))
        if not self._waiting():
            self._end_round()
        # The scaler calls the optimizer only where all gradients are finite, and asks the device for that anyway.
        return self._steps_taken == before

    def forget(self, optimizer: torch.optim.Optimizer) -> None:
        """Take notice that the gradients of ``optimizer`` were cleared instead of used."""
        if id(optimizer) in self._unscaled:
            self._unscaled.discard(id(optimizer))
            self._done.add(id(optimizer))

    def _waiting(self) -> bool:
        """Return whether an optimizer may still step in this round."""
        return any(
            key not in self._done and _has_gradients(optimizer)
            for key, optimizer in list(self._optimizers.items())
        )

    def _end_round(self) -> None:
        if self._done:
            self._scaler.update()
            self._done.clear()
            self._unscaled.clear()

    def _count_step(self, *args: Any) -> None:
        self._steps_taken += 1


_MIXED = (
    "fp16: unscale_() has already been called on this optimizer since the last update(): it was clipped or unscaled, "
    "and {}, so that gradients of true size and scaled ones would be mixed. Clip, or call unscale_gradients, only "
    "where the optimizer steps: if accelerator.sync_gradients: accelerator.clip_grad_norm_(parameters, max_norm)"
)


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor | None]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            yield parameter.grad


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(gradient is not None for gradient in _gradients(optimizer))


def _versions(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """Return numbers that change whenever a gradient does."""
    with torch.no_grad():  # otherwise each look at a shard makes a new tensor
        held = [None if gradient is None else dtensor.local(gradient) for gradient in _gradients(optimizer)]
    return [(0, 0) if one is None else (id(one), one._version) for one in held]
