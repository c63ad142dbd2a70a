"""One training step: backward, accumulation, clipping, and when ranks average their gradients.

:class:`GradientControl` is the part of the ``Accelerator`` that handles gradients. When they are synchronised is
decided in ``accumulation.py``, how by the strategy, and in which number format by the precision.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from nblaunch.training import advice, strategies
from nblaunch.training.collectives import nested
from nblaunch.training.data.sharding import BatchSamplerShard
from nblaunch.training.optimizer import AcceleratedOptimizer
from nblaunch.training.options import AutocastKwargs
from nblaunch.training.precision import Precision
from nblaunch.training.prepare import Preparer
from nblaunch.training.session import Session
from nblaunch.training.strategies import Strategy


class GradientControl(ABC):
    """Gradients of one process. The final class gives it its parts."""

    _session: Session
    _precision: Precision
    _strategy: Strategy
    _preparer: Preparer

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-step ends in an optimizer step."""
        return self._session.gradients.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._session.gradients.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-steps per optimizer step."""
        return self._session.gradients.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, num_steps: int) -> None:
        self._session.gradients.set_num_steps(num_steps)

    @property
    def step(self) -> int:
        """Micro-steps since the last window that a loader's end closed."""
        return self._session.gradients.step

    @step.setter
    def step(self, step: int) -> None:
        self._session.gradients.step = step

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether any optimizer left out its last step because fp16 gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._preparer.optimizers)

    # --- one micro-step ------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """``loss.backward(**kwargs)``, with the loss divided by the micro-steps of a window, and scaled for fp16.

        The value is shown on the dashboard, at most twice a second and at the end of a pass: reading it makes the
        process wait for the device.
        """
        self._session.check_home()
        if not self._session.has_begun:
            self._session.begin()
        divisor = self._session.gradients.divisor
        self._session.own_time.begin_backward()
        self._strategy.backward(loss / divisor if divisor > 1 else loss, self._precision, **kwargs)
        self._session.own_time.end_backward()
        self._session.losses.note(loss, not self._session.member.backend.is_lazy)

    @contextmanager
    def accumulate(self, *models: torch.nn.Module) -> Iterator[None]:
        """One micro-step: gradients are reduced and optimizers step only where the window ends.

        A window ends after ``gradient_accumulation_steps`` micro-steps, and at the last batch of a prepared loader.

        Args:
            *models: those whose gradients are accumulated in the block, one or several.
        """
        gradients = self._session.gradients
        gradients.advance()
        if gradients.rescale != 1.0:
            for model in models or self._preparer.models:
                self._strategy.multiply_gradients(model, gradients.rescale)
        is_synced = gradients.sync_gradients or gradients.plugin.sync_each_batch
        with ExitStack() as stack:
            for model in () if is_synced else models:
                stack.enter_context(self._strategy.no_sync(model))
            yield

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Context manager: ``backward`` leaves gradients unreduced. Does nothing in a lone process."""
        return self._strategy.no_sync(model)

    @staticmethod
    def trigger_sync_in_backward(model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Context manager: the next ``backward`` reduces gradients although its forwards ran under :meth:`no_sync`.

        For several forwards and one backward. Does nothing for a model that is not spread over processes.
        """
        return strategies.sync_in_backward(model)

    @contextmanager
    def join_uneven_inputs(
        self, joinables: Iterable[Any], even_batches: bool | None = None
    ) -> Iterator[None]:
        """While it lasts, ranks may have unequal numbers of batches: who is through answers for the others' steps.

        Gradients are averaged over the ranks that still have data. Other collectives in the loop (``gather``) are not
        answered for.

        Args:
            joinables: the prepared models (and optimizers that communicate) of the loop.
            even_batches: overrides the setting of all prepared loaders over indexed datasets inside the block.
        """
        with ExitStack() as stack:
            if even_batches is not None and self._session.member.topology.world_size > 1:
                stack.enter_context(_even_batches(self._preparer.loaders, even_batches))
            stack.enter_context(self._strategy.join(list(joinables)))
            yield

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Context manager: mixed precision for computations outside of a prepared model, such as a loss."""
        return self._precision.autocast(autocast_handler)

    # --- gradients in hand ---------------------------------------------------------------------------------------

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Bring fp16 gradients to their true size: those of ``optimizer``, by default of all prepared ones."""
        for one in self._preparer.optimizers if optimizer is None else nested.leaves(optimizer):
            self._precision.unscale(one.optimizer if isinstance(one, AcceleratedOptimizer) else one)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip gradients by their total norm, in true size. Call it where gradients sync.

        Args:
            parameters: a parameter or an iterable of them.
            max_norm: largest norm that is left as it is.
            norm_type: as the p of the norm; ``float("inf")`` for the largest element.

        Returns:
            The norm before.
        """
        return self._strategy.clip_grad_norm(self._true_gradients_of(parameters), max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip gradients elementwise to [-clip_value, clip_value], in true size. Call it where gradients sync."""
        self._strategy.clip_grad_value(self._true_gradients_of(parameters), clip_value)

    def _true_gradients_of(self, parameters: Any) -> list[torch.Tensor]:
        """The parameters as a list, once their gradients are those of all ranks, and not scaled."""
        listed = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if self.sync_gradients:
            wanted = {id(parameter) for parameter in listed}
            for optimizer in self._preparer.optimizers:
                optimizer.reduce_gradients(wanted)
        self.unscale_gradients()
        return listed


@contextmanager
def _even_batches(loaders: Sequence[Any], even_batches: bool) -> Iterator[None]:
    """Override the setting in the shards of ``loaders``, and put back what each of them had."""
    shards = [loader.shard for loader in loaders if isinstance(loader.shard, BatchSamplerShard)]
    if len(shards) < len(loaders):
        advice.warn(
            f"join_uneven_inputs(even_batches={even_batches}) changes loaders over indexed datasets that every rank "
            f"reads by itself; {len(loaders) - len(shards)} of the {len(loaders)} prepared loaders are of another kind "
            "and stay as they are"
        )
    before = [shard.even_batches for shard in shards]
    try:
        for shard in shards:
            shard.set_even_batches(even_batches)
        yield
    finally:
        for shard, setting in zip(shards, before, strict=True):
            shard.even_batches = setting
