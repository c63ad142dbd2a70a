"""Gradients in a training loop: the backward pass, the block of a micro-step, unscaling and clipping.

The methods of an ``Accelerator`` pass its :class:`Preparer` to these functions. ``accumulation.py`` decides when
gradients are synchronised, the strategy decides how, and the precision sets the number format.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ContextDecorator, ExitStack, contextmanager
from time import monotonic
from typing import Any

import torch

from nblaunch.errors import warn
from nblaunch.training.accumulation import AccumulationState
from nblaunch.training.collectives import nested
from nblaunch.training.models import bare_module
from nblaunch.training.optimizer import AcceleratedOptimizer
from nblaunch.training.prepare import Preparer
from nblaunch.training.shared_state import get_shared_state


def backward(preparer: Preparer, loss: torch.Tensor, options: dict[str, Any]) -> None:
    """Compute gradients, and show the loss; see ``Accelerator.backward``. Called in every micro-step.

    Args:
        preparer: the Accelerator's preparer.
        loss: a tensor with one element.
        options: keyword arguments for :meth:`torch.Tensor.backward`, or ``learning_rate``.
    """
    shared, divisor = preparer.shared, preparer.accumulation.plugin.num_steps
    if not shared.has_checked_models:
        shared.check_models()
    if shared.process.slot.updates >= shared.watch.due_at:
        shared.watch.before_backward(preparer, loss, options)
    is_shown, busy_time = shared.is_shown, shared.busy_time
    busy_time.is_in_backward = is_shown
    began_s = monotonic()
    try:
        if options and "learning_rate" in options and _lomo_optimizers(preparer):
            lomo_backward(preparer, loss / divisor, options["learning_rate"])
        else:
            preparer.strategy.backward(loss, divisor, preparer.precision, options)
    except BaseException:
        busy_time.is_in_backward = False
        raise
    if is_shown:
        ended_s = busy_time.end_backward(began_s)
        shared.losses.note(loss, None if shared.process.backend.is_lazy else ended_s)
    else:
        shared.losses.num_noted += 1


def lomo_backward(preparer: Preparer, loss: torch.Tensor, learning_rate: float) -> None:
    """Compute gradients and step in one call; see ``Accelerator.lomo_backward``."""
    if learning_rate is None:
        raise ValueError(
            "lomo_backward needs a learning rate: LOMO optimizers step while they compute gradients"
        )
    optimizers = _lomo_optimizers(preparer)
    if not optimizers:
        raise ValueError(
            "lomo_backward needs a LOMO optimizer, but none was prepared: pass lomo_optim.Lomo(model) or "
            "lomo_optim.AdaLomo(model) to accelerator.prepare()"
        )
    for optimizer in optimizers:
        optimizer.optimizer.fused_backward(loss, learning_rate)


def _lomo_optimizers(preparer: Preparer) -> list[Any]:
    return [optimizer for optimizer in preparer.optimizers if optimizer.steps_in_backward]


class MicroStep(ContextDecorator):
    """Context manager: runs its block as one micro-step; see ``Accelerator.accumulate``.

    It is a class, because a generator would take more time in every step.

    Args:
        preparer: the Accelerator's preparer.
        models: the models whose gradients are accumulated.
    """

    __slots__ = ("_accumulation", "_models", "_outer", "_preparer", "_unsynchronised")

    def __init__(self, preparer: Preparer, models: Sequence[torch.nn.Module]) -> None:
        self._preparer = preparer
        self._models = models
        self._unsynchronised: ExitStack | None = None

    def __enter__(self) -> None:
        preparer = self._preparer
        accumulation = self._accumulation = preparer.shared.accumulation = preparer.accumulation
        window, models = accumulation.current, self._models
        passed = window.passed
        # Avoid a call in the usual case, because this runs in every micro-step.
        if len(passed) != 1 or len(models) != 1 or passed[0]() is not models[0]:
            window = accumulation.window_of([bare_module(model) for model in models])
            window.passed = [weakref.ref(model) for model in models]
        self._outer = accumulation.enter(window)
        try:
            if window.is_short and not accumulation.has_named_short_window:
                _name_short_window(accumulation, preparer.shared.process.topology.rank)
            if not (window.sync_gradients or accumulation.syncs_each_batch):
                self._unsynchronised = self._leave_out_reduction()
        except BaseException:
            accumulation.leave(self._outer)
            raise

    def _leave_out_reduction(self) -> ExitStack:
        with ExitStack() as stack:
            for model in self._models:
                stack.enter_context(self._preparer.strategy.no_sync(model))
            return stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        try:
            if self._unsynchronised is not None:
                unsynchronised, self._unsynchronised = self._unsynchronised, None
                unsynchronised.__exit__(*error)
        finally:
            accumulation, outer = self._accumulation, self._outer
            accumulation.entered = outer  # inlines ``AccumulationState.leave``
            if outer is not None:
                accumulation.current = outer


def _name_short_window(accumulation: AccumulationState, rank: int) -> None:
    """Warn once, on rank 0, about the number by which a short window's gradients are divided."""
    size, num_steps = accumulation.current.size, accumulation.num_steps
    accumulation.has_named_short_window = True
    if rank == 0 and accumulation.plugin.divide_by_actual is None:
        warn(
            f"the last accumulation window of the loader has {size} of {num_steps} micro-steps, but its gradients "
            f"are divided by {num_steps}, as in Accelerate, so its step is {size}/{num_steps} of the usual size. "
            f"GradientAccumulationPlugin(num_steps={num_steps}, divide_by_actual=True) divides by {size}. "
            "divide_by_actual=False silences this warning, for example if the loss is a sum divided by a token count"
        )


@contextmanager
def sync_in_backward(model: torch.nn.Module) -> Iterator[None]:
    """Make the next ``backward`` in the block reduce gradients; see ``Accelerator.trigger_sync_in_backward``."""
    with ExitStack() as stack:
        for strategy in list(get_shared_state().strategies.values()):
            stack.enter_context(strategy.sync_in_backward(model))
        yield


def unscale(preparer: Preparer, optimizer: Any) -> None:
    """Unscale fp16 gradients; see ``Accelerator.unscale_gradients``."""
    for given in preparer.optimizers if optimizer is None else nested.leaves(optimizer):
        preparer.precision.unscale(given.optimizer if isinstance(given, AcceleratedOptimizer) else given)


def clip_grad_norm(preparer: Preparer, parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor:
    """Clip gradients by their total norm; see ``Accelerator.clip_grad_norm_``."""
    listed = _bring_to_true_size(preparer, parameters)
    preparer.shared.watch.before_clip(listed, max_norm)
    return preparer.strategy.clip_grad_norm(listed, max_norm, norm_type)


def clip_grad_value(preparer: Preparer, parameters: Any, clip_value: float) -> None:
    """Clip gradients elementwise; see ``Accelerator.clip_grad_value_``."""
    listed = _bring_to_true_size(preparer, parameters)
    preparer.shared.watch.before_clip(listed, None)
    preparer.strategy.clip_grad_value(listed, clip_value)


def _bring_to_true_size(
    preparer: Preparer, parameters: torch.Tensor | Iterable[torch.Tensor]
) -> list[torch.Tensor]:
    """Average and unscale gradients of ``parameters``; return the parameters as a list.

    Gradients are averaged over ranks unless backward has already averaged them. Optimizers that hold none of the
    parameters are not touched, because they may have no gradients yet. If no prepared optimizer has any of the
    parameters, the gradients of all optimizers are unscaled.
    """
    listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    wanted = {id(parameter) for parameter in listed}
    owners = [optimizer for optimizer in preparer.optimizers if optimizer.has_any(wanted)]
    for optimizer in owners:
        if optimizer.is_due:
            optimizer.reduce_gradients()
    unscale(preparer, owners or None)
    return listed
