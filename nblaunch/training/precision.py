"""The number format of the forward pass, and how it affects the backward pass, clipping and the step.

:class:`Precision` is full precision: its methods add nothing to plain PyTorch. Subclasses override only what their
format needs. The backend decides which formats a device supports. These functions choose the format:

    argument ──> ``StrategyPlugin.precision_name`` ──> ``arguments.resolve_precision`` ──> :func:`make`
             ──> ``Strategy.adapt_precision``

For fp8, torchao replaces linear layers with layers that compute in 8 bits; see :class:`AORecipeKwargs`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from nblaunch import context, env
from nblaunch.backends.base import Backend
from nblaunch.errors import warn
from nblaunch.spec import MIXED_PRECISIONS
from nblaunch.training.collectives import dtensor, nested
from nblaunch.training.joining import current_topology
from nblaunch.training.options import AutocastKwargs, GradScalerKwargs, KwargsHandler, check_choice


class Precision:
    """Full precision: nothing is converted or scaled.

    Args:
        backend: the device family.
        handlers: the Accelerator's handlers, by type, with settings for autocast, the gradient scaler and fp8. Users
            may replace them at any time.
    """

    name = "no"
    dtype: torch.dtype | None = None
    scales_gradients = False
    """Whether optimizers must step and clear gradients through this object."""

    def __init__(self, backend: Backend, handlers: Mapping[type, Any]) -> None:
        self._backend = backend
        self._handlers = handlers

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler; None if losses are not scaled."""
        return None

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        """Record a prepared optimizer."""

    def autocast(self, options: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Run the block in this precision, for code outside a prepared model. ``options`` override the handler."""
        if self.dtype is None:
            return nullcontext()
        options = options or self._handlers.get(AutocastKwargs) or AutocastKwargs()
        return self._backend.autocast(
            self.dtype, enabled=options.enabled, cache_enabled=options.cache_enabled
        )

    def convert_layers(self, model: torch.nn.Module, is_sharded: bool) -> None:
        """Replace layers with layers that compute in this precision. Called before :meth:`prepare_forward`."""

    def prepare_forward(self, model: torch.nn.Module) -> None:
        """Make ``model.forward`` compute in this precision, after undoing an earlier preparation."""
        restore_forward(model)
        if self.dtype is not None:
            wrapped = AutocastForward(model, self)
            # Bypass Module.__setattr__, which handles parameters, buffers and submodules.
            model.__dict__.update(_original_forward=wrapped.original, forward=wrapped)

    def backward(self, loss: torch.Tensor, options: dict[str, Any]) -> None:
        """Call ``loss.backward(**options)``, with a scaled loss if the precision needs it."""
        loss.backward(**options)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Unscale the gradients of ``optimizer``, before they are clipped or read."""

    def has_scaled_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether the gradients of ``optimizer`` still contain a loss scale."""
        return False

    def forget_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Record that the gradients of ``optimizer`` were cleared."""

    def step(self, optimizer: torch.optim.Optimizer, closure: Any = None) -> bool | torch.Tensor:
        """Step ``optimizer``. Return whether the step was skipped because gradients overflowed.

        If the device decides this, the result is a tensor. The call then returns without waiting for the device, but
        code that reads the tensor has to wait.
        """
        if closure is None:
            optimizer.step()
        else:
            optimizer.step(closure)
        return False


class Bf16Precision(Precision):
    """Autocast to bfloat16, which has the same range as fp32, so gradients need no scaling."""

    name = "bf16"
    dtype = torch.bfloat16


class Fp8Precision(Bf16Precision):
    """Linear layers compute in 8 bits, with torchao; the rest of the model uses bf16."""

    name = "fp8"

    def __init__(self, backend: Backend, handlers: Mapping[type, Any]) -> None:
        super().__init__(backend, handlers)
        self.recipe: AORecipeKwargs = handlers.get(AORecipeKwargs) or AORecipeKwargs()

    def convert_layers(self, model: torch.nn.Module, is_sharded: bool) -> None:
        self.recipe.convert(model, is_sharded)


class DeviceBf16Precision(Precision):
    """bf16 on a device that represents fp32 as bfloat16: there is nothing to do."""

    name = "bf16"


class ReplacedFp16Precision(Precision):
    """Full precision on a device that does not support fp16."""

    name = "fp16"


class Fp16Precision(Precision):
    """Autocast to float16, with a scaled loss to keep small gradients from vanishing.

    Several optimizers share one gradient scaler. torch's scaler needs one ``update`` per round of backward passes and
    steps, after all optimizers have stepped. An earlier ``update`` could change the scale, which the remaining
    optimizers still need. It would also forget which gradients were unscaled. This class decides when a round is over::

        backward   unscale(a) unscale(b)   step(a)   step(b)   -> update
        backward   unscale(a)   step(a)   backward   ...       -> update before the second backward
    """

    name = "fp16"
    dtype = torch.float16
    scales_gradients = True

    def __init__(self, backend: Backend, handlers: Mapping[type, Any]) -> None:
        super().__init__(backend, handlers)
        scaling = handlers.get(GradScalerKwargs) or GradScalerKwargs()
        self._scaler = backend.grad_scaler(**scaling.to_kwargs())
        self._was_skipped: bool | torch.Tensor = False
        self._know_no_optimizers()

    def _know_no_optimizers(self) -> None:
        self._optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._unscaled: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # in this round
        self._done: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()  # in this round
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = (
            weakref.WeakSet()
        )  # since the last backward pass

    def __getstate__(self) -> dict[str, Any]:
        # When a model is copied, this object is copied with the model's ``forward``, but the optimizers are not.
        return {name: value for name, value in vars(self).items() if not isinstance(value, weakref.WeakSet)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._know_no_optimizers()

    @property
    def scaler(self) -> torch.amp.GradScaler:
        """torch's scaler. After the end of a round, the scaler already has the scale for the next round."""
        if not self._waiting():
            self._end_round()
        return self._scaler

    def register(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizers.add(optimizer)

    def backward(self, loss: torch.Tensor, options: dict[str, Any]) -> None:
        """Compute scaled gradients.

        Raises:
            RuntimeError: an optimizer's unscaled gradients would be mixed with scaled ones.
        """
        for optimizer in list(self._unscaled):
            if not _has_gradients(optimizer):
                self.forget_gradients(optimizer)
        if self._done and self._unscaled - self._done:
            raise RuntimeError(_MIXED.format("has not stepped since"))
        self._end_round()
        self._stepped.clear()
        before = {optimizer: _versions(optimizer) for optimizer in self._unscaled}
        self._scaler.scale(loss).backward(**options)
        if any(_versions(optimizer) != versions for optimizer, versions in before.items()):
            raise RuntimeError(_MIXED.format("received more gradients from backward before it stepped"))

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        self.register(optimizer)
        if optimizer in self._done:
            self._end_round()
        # The scaler rejects unscaling twice in a round, but users may clip by norm and then by value.
        if optimizer not in self._unscaled and _has_gradients(optimizer):
            self._scaler.unscale_(optimizer)
            self._unscaled.add(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, closure: Any = None) -> bool | torch.Tensor:
        self.register(optimizer)
        if optimizer in self._done:
            self._end_round()
        self._was_skipped = True
        with self._watching_step(optimizer):
            if closure is None:
                self._scaler.step(optimizer)
            else:
                self._scaler.step(optimizer, closure)
        self._done.add(optimizer)
        self._stepped.add(optimizer)
        if not self._waiting():
            self._end_round()
        return self._was_skipped

    def has_scaled_gradients(self, optimizer: torch.optim.Optimizer) -> bool:
        if optimizer in self._unscaled or optimizer in self._stepped:
            return False
        state = getattr(self._scaler, "_per_optimizer_states", {}).get(id(optimizer), {})
        return getattr(state.get("stage"), "name", "READY") == "READY"  # users may call the scaler themselves

    def forget_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        if optimizer in self._unscaled:
            self._done.add(optimizer)  # it no longer keeps the round open

    def _waiting(self) -> bool:
        """Return whether an optimizer may still step in this round."""
        return any(
            optimizer not in self._done and _has_gradients(optimizer) for optimizer in list(self._optimizers)
        )

    def _end_round(self) -> None:
        if self._done:
            self._scaler.update()
            self._done.clear()
            self._unscaled.clear()

    @contextmanager
    def _watching_step(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Record in ``_was_skipped`` whether the scaler skips ``optimizer.step`` in the block.

        The scaler normally waits for the device, and calls ``step`` only if all gradients are finite. It always calls
        ``step`` on a fused optimizer, which skips the update on the device if the tensor ``found_inf`` is nonzero.

        A step hook would not work: it needs ``Optimizer.__init__`` to have run, but an optimizer that wraps another one
        may not call it.
        """
        attributes, step = vars(optimizer), optimizer.step
        replaced = attributes.get("step")  # a scheduler may have set it

        @functools.wraps(step)  # the scaler inspects the signature
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._was_skipped = attributes.get("found_inf", False)
            return step(*args, **kwargs)

        attributes["step"] = counted
        try:
            yield
        finally:
            if replaced is None:
                del attributes["step"]
            else:
                attributes["step"] = replaced


_MIXED = (
    "fp16: unscale_() has already been called on this optimizer since the last update(): its gradients were clipped or "
    "unscaled, and it {}, so scaled and unscaled gradients would be mixed. Clip, or call unscale_gradients, only "
    "when the optimizer steps: if accelerator.sync_gradients: accelerator.clip_grad_norm_(parameters, max_norm)"
)


def _gradients(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from (parameter.grad for parameter in group["params"] if parameter.grad is not None)


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(True for _ in _gradients(optimizer))


def _versions(optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """Return numbers that change whenever a gradient changes."""
    with torch.no_grad():  # otherwise, each access to a shard would create a new tensor
        held = [dtensor.local(gradient) for gradient in _gradients(optimizer)]
    return [(id(gradient), gradient._version) for gradient in held]


class AutocastForward:
    """A model's ``forward`` under autocast, with fp32 outputs for computing losses in full precision.

    It is an object rather than a closure, so that deep copies of the model, such as averaged models, call their own
    ``forward``.
    """

    def __init__(self, model: torch.nn.Module, precision: Precision) -> None:
        self.original = model.forward
        self.precision = precision
        self.had_own = "forward" in model.__dict__

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        """The model's own ``forward``, for :mod:`inspect`: transformers' ``generate`` reads its signature."""
        return self.original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision.autocast():
            output = self.original(*args, **kwargs)
        return nested.convert_to_fp32(output)


def convert_outputs_to_fp32(model_forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``model_forward`` with fp32 outputs, as ``prepare`` does for half precision."""

    @functools.wraps(model_forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return nested.convert_to_fp32(model_forward(*args, **kwargs))

    return forward


def restore_forward(model: torch.nn.Module) -> None:
    """Undo :meth:`Precision.prepare_forward`; do nothing if it was not applied."""
    wrapped = model.__dict__.get("forward")
    if not isinstance(wrapped, AutocastForward):
        return
    del model.forward
    if wrapped.had_own:
        model.forward = wrapped.original
    model.__dict__.pop("_original_forward", None)


def make(name: Any, backend: Backend, handlers: Mapping[type, Any]) -> Precision:
    """Return the precision called ``name``.

    Raises:
        ValueError: the name is unknown, the device does not support it, or an fp8 recipe was passed with another
            precision.
    """
    name = str(getattr(name, "value", name)).lower()
    check_choice("mixed_precision", name, MIXED_PRECISIONS)
    recipe = handlers.get(AORecipeKwargs)
    if recipe is None or not recipe.is_emulated or name != "fp8":
        backend.check_precision(name)
    if recipe is not None and name != "fp8":
        raise ValueError(f"AORecipeKwargs needs mixed_precision='fp8', but mixed_precision={name!r}")
    if name == "fp16" and (reason := backend.precision_problem(name)) is not None:
        if current_topology().rank == 0:
            warn(f"mixed_precision='fp16' has no effect: {reason}")
        return ReplacedFp16Precision(backend, handlers)
    if name == "bf16" and backend.switch_to_bf16():
        return DeviceBf16Precision(backend, handlers)
    kinds = (Precision, Fp16Precision, Bf16Precision, Fp8Precision)
    return next(kind for kind in kinds if kind.name == name)(backend, handlers)


# --- fp8 --------------------------------------------------------------------------------------------------------------

_MULTIPLE = 16
"""The GPU's 8-bit multiplication needs layer sizes that are multiples of this number; see ``torch._scaled_mm``."""


@dataclass
class AORecipeKwargs(KwargsHandler):
    """Settings for ``Accelerator(mixed_precision="fp8")``, which trains with torchao.

    Args:
        config: torchao's ``Float8LinearConfig``; None: build it from the last two fields. With ``emulate=True``, any
            device computes the same numbers, but slowly; use it for tests.
        module_filter_func: ``function(module, name)`` that returns whether to convert a linear layer. None: convert all
            linear layers except the first, the last, and layers whose sizes are not multiples of 16.
        pad_inner_dim: pad matrices whose sizes are not multiples of 16. None: the launch's ``--fp8_pad_inner_dim``, or
            the variable ``ACCELERATE_FP8_PAD_INNER_DIM``; True if neither is set.
        enable_fsdp_float8_all_gather: FSDP2 gathers weights in 8 bits. None: the launch's setting, or the variable
            ``ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER``; True if neither is set. It has no effect without FSDP2.

    Raises:
        ImportError: torchao is not installed.
    """

    config: Any = None
    module_filter_func: Callable[[torch.nn.Module, str], bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None

    def __post_init__(self) -> None:
        float8 = _library()
        if self.config is None:
            context.complete_from_launch(self, "fp8_recipe")
            for name in ("pad_inner_dim", "enable_fsdp_float8_all_gather"):
                if getattr(self, name) is None:
                    setattr(self, name, env.read(f"ACCELERATE_FP8_{name.upper()}"))
            self.config = float8.Float8LinearConfig(
                pad_inner_dim=self.pad_inner_dim,
                enable_fsdp_float8_all_gather=self.enable_fsdp_float8_all_gather,
            )
        super().__post_init__()

    @property
    def is_emulated(self) -> bool:
        """Whether the recipe works on any device."""
        return bool(self.config.emulate)

    def convert(self, model: torch.nn.Module, is_sharded: bool) -> None:
        """Convert the layers of ``model`` in place. Parameters are kept, or wrapped to be gathered in 8 bits."""
        config = self.config
        if not is_sharded and config.enable_fsdp_float8_all_gather:
            config = dataclasses.replace(config, enable_fsdp_float8_all_gather=False)
        chosen = self.module_filter_func or _inner_layers(model)
        _library().convert_to_float8_training(model, module_filter_fn=chosen, config=config)


def _library() -> Any:
    try:
        return importlib.import_module("torchao.float8")
    except ImportError as error:
        raise ImportError(
            "training in fp8 needs torchao, which is not installed: pip install torchao", name="torchao"
        ) from error


def _inner_layers(model: torch.nn.Module) -> Callable[[torch.nn.Module, str], bool]:
    """Return a filter for all linear layers except the first and the last, which are unstable in 8 bits."""
    linear = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    kept = {*linear[:1], *linear[-1:]}

    def is_converted(module: torch.nn.Module, name: str) -> bool:
        if not isinstance(module, torch.nn.Linear) or name in kept:
            return False
        return module.in_features % _MULTIPLE == 0 and module.out_features % _MULTIPLE == 0

    return is_converted
