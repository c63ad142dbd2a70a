"""The parts of a DeepSpeed engine that the user's loop uses: optimizer and scheduler, clipping, and 16-bit weights.

In one call, the engine clips, steps, clears gradients and advances its schedule; ``optimizer.step()`` makes that call.
The engine holds gradients in shards, so computing their norm requires a collective. ``clip_grad_norm_`` only sets the
limit, which the engine applies when it steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from nblaunch.backends.base import Backend
from nblaunch.training.accumulation import AccumulationState
from nblaunch.training.collectives import nested
from nblaunch.training.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from nblaunch.training.precision import AutocastForward, Precision, restore_forward


class EnginePrecision(Precision):
    """Converts inputs and outputs for an engine, which scales losses and keeps fp32 copies of weights itself."""

    def __init__(self, other: Precision) -> None:
        super().__init__(other._backend, {})
        self.name = other.name

    def prepare_forward(self, model: torch.nn.Module) -> None:
        """Make ``model`` accept fp32 batches and return fp32 outputs, as with autocast."""
        restore_forward(model)
        if self.name != "no":
            wrapped = CastForward(model, self)
            model.__dict__.update(_original_forward=wrapped.original, forward=wrapped)


class CastForward(AutocastForward):
    """Calls a model's ``forward`` with floating-point inputs in the dtype of its weights, and returns fp32 outputs.

    An engine's weights are in 16 bits, and most layers do not accept mixed dtypes.
    """

    def __init__(self, model: torch.nn.Module, precision: Precision) -> None:
        super().__init__(model, precision)
        self.parameters = model.parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dtype = next((p.dtype for p in self.parameters() if p.is_floating_point()), None)
        if dtype in (torch.float16, torch.bfloat16):

            def cast(tensor: torch.Tensor) -> torch.Tensor:
                return tensor.to(dtype) if tensor.is_floating_point() else tensor

            args, kwargs = nested.map_tensors(cast, args), nested.map_tensors(cast, kwargs)
        return nested.convert_to_fp32(self.original(*args, **kwargs))


def check_clipping(
    engine: Any, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float
) -> None:
    """Raise ValueError if an engine can't clip in the requested way."""
    if norm_type != 2:
        raise ValueError(f"norm_type={norm_type} can't be used with DeepSpeed, which clips by the 2-norm")
    configured = engine.gradient_clipping()
    if configured and configured != max_norm:
        raise ValueError(
            f"clip_grad_norm_(max_norm={max_norm}) contradicts gradient_clipping={configured} in the DeepSpeed "
            'configuration; set it in one place, or write "auto" there'
        )
    trainable = {id(parameter) for parameter in engine.module.parameters() if parameter.requires_grad}
    passed = {id(parameter) for parameter in parameters if parameter.requires_grad}
    if passed != trainable:
        raise ValueError(
            f"clip_grad_norm_ got {len(passed)} trainable parameters, but DeepSpeed clips all {len(trainable)} "
            "parameters of its model together; pass model.parameters()"
        )


def set_max_norm(engine: Any, max_norm: float) -> None:
    """Make the next step clip to ``max_norm``; 0: do not clip."""
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = max_norm
    elif max_norm and max_norm != engine.gradient_clipping():  # plain fp32: every rank holds all gradients
        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), max_norm)


def total_norm(engine: Any) -> torch.Tensor:
    """Return the norm of all unscaled gradients. All ranks must call this between backward and step."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "scaled_global_norm"):  # stages 1 and 2
        norms = [optimizer.scaled_global_norm()]
    elif hasattr(optimizer, "_get_norm_groups"):  # stage 3
        norms = optimizer._get_norm_groups()
    else:
        gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
        if not gradients:
            return last_total_norm(engine)  # bf16 with fp32 gradients: the step computes the norm
        norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    groups = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in norms])
    if bool((groups < 0).any()):  # the engine signals an overflow this way
        return torch.tensor(float("inf"))
    return torch.linalg.vector_norm(groups) / float(getattr(optimizer, "loss_scale", 1.0) or 1.0)


def last_total_norm(engine: Any) -> torch.Tensor:
    """Return the gradient norm of the last step; 0 if there was none."""
    return torch.as_tensor(engine.get_global_grad_norm() or 0.0, dtype=torch.float32)


class EngineOptimizer(AcceleratedOptimizer):
    """A prepared optimizer that an engine steps. Its ``param_groups`` and state cover this rank's shard.

    Args:
        step: steps the engine; returns whether the engine skipped the step because gradients overflowed.
    """

    def __init__(
        self,
        engine: Any,
        step: Callable[[], bool],
        accumulation: AccumulationState,
        precision: Precision,
        backend: Backend,
    ) -> None:
        super().__init__(engine.optimizer, accumulation, precision, backend, place_state=False)
        self.engine = engine
        self._step_engine = step

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the engine clears gradients after it steps."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step the engine; do nothing in the middle of an accumulation window.

        Raises:
            ValueError: a closure was given.
        """
        if closure is not None:
            raise ValueError(
                "DeepSpeed's engine does not support a closure: call optimizer.step() without one"
            )
        if self._accumulation.sync_gradients:
            self._is_overflow = self._step_engine()

    def reduce_gradients(self) -> None:
        """Do nothing: the engine averages gradients in backward."""

    def __repr__(self) -> str:
        return f"EngineOptimizer({self.optimizer!r})"


class EngineScheduler(AcceleratedScheduler):
    """A prepared scheduler that the engine steps with each of its own steps."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine steps its scheduler."""


# Accelerate's names, which trainers use to recognise objects that an engine steps.
DeepSpeedOptimizerWrapper = EngineOptimizer
DeepSpeedSchedulerWrapper = EngineScheduler
