"""Prepared optimizers, which step only when the accumulation window ends, and schedulers, which step with them.

With ``step_scheduler_with_optimizer=False``, a scheduler steps on every call.

The user writes the plain loop (``optimizer.step(); scheduler.step(); optimizer.zero_grad()``), and the wrappers ignore
calls in the middle of an accumulation window or after an overflow.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from nblaunch.backends.base import Backend
from nblaunch.training.accumulation import AccumulationState
from nblaunch.training.precision import Precision


def _of_inner(name: str) -> property:
    """Return a property that reads and sets an attribute of the inner optimizer."""
    return property(
        lambda self: getattr(self.optimizer, name),
        lambda self, value: setattr(self.optimizer, name, value),
    )


class AcceleratedOptimizer(torch.optim.Optimizer):
    """An optimizer that steps only when gradients are synchronised.

    Args:
        optimizer: the user's optimizer, kept as ``.optimizer``.
        accumulation: decides when to step.
        precision: takes the step.
        backend: notified of every step.
        place_state: move the optimizer's state to the devices of its parameters.

    ``steps_in_backward``: whether the optimizer steps while it computes gradients, as ``lomo_optim.Lomo`` does.
    """

    # Views that the Accelerator adds for users. Nothing here reads them.
    gradient_state: Any
    accelerator_state: Any

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        accumulation: AccumulationState,
        precision: Precision,
        backend: Backend,
        place_state: bool = True,
    ) -> None:
        # Don't call super().__init__(): all attributes come from the inner optimizer.
        self.optimizer = optimizer
        self._accumulation = accumulation
        self._precision = precision
        self._backend = backend
        self._is_overflow: bool | torch.Tensor = False
        self._is_reduced = False
        self.steps_in_backward = hasattr(optimizer, "fused_backward")
        self._is_accelerate_prepared = True
        self.device_placement = place_state
        choice = inspect.signature(optimizer.zero_grad).parameters.get("set_to_none")
        self._needs_no_choice = choice is None or choice.default is True
        precision.register(optimizer)
        if place_state and _has_misplaced_state(optimizer):
            # Here, torch moves each state to its parameter's device.
            optimizer.load_state_dict(optimizer.state_dict())

    def __getattr__(self, name: str) -> Any:
        # This also makes torch's hook methods register their hooks with the inner optimizer.
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    state: Any = _of_inner("state")
    """The inner optimizer's state."""

    param_groups: Any = _of_inner("param_groups")
    """The inner optimizer's parameter groups."""

    defaults: Any = _of_inner("defaults")
    """The inner optimizer's default settings."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, as :class:`torch.optim.Optimizer` does."""
        self.optimizer.add_param_group(param_group)
        self._accumulation.forget_owners()

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as :class:`torch.optim.Optimizer` does."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, as :class:`torch.optim.Optimizer` does."""
        self.optimizer.load_state_dict(state_dict)

    def train(self) -> None:
        """Call the inner optimizer's ``train``, if it has one."""
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()

    def eval(self) -> None:
        """Call the inner optimizer's ``eval``, if it has one."""
        if hasattr(self.optimizer, "eval"):
            self.optimizer.eval()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clear gradients; do nothing in the middle of an accumulation window.

        Args:
            set_to_none: drop gradients instead of filling them with zeros. None: like True, if the optimizer
                has the argument.
        """
        accumulation = self._accumulation
        window = accumulation.current if len(accumulation.windows) == 1 else accumulation.window_for(self)
        if not window.sync_gradients:
            return
        self._is_reduced = False
        optimizer = self.optimizer
        if set_to_none is None and self._needs_no_choice:
            optimizer.zero_grad()  # torch would pass an argument on through several functions
        else:
            optimizer.zero_grad(set_to_none=set_to_none is not False)
        if self._precision.scales_gradients:
            self._precision.forget_gradients(optimizer)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Take a step; do nothing in the middle of an accumulation window. LOMO optimizers step in backward instead."""
        accumulation, backend = self._accumulation, self._backend
        window = accumulation.current if len(accumulation.windows) == 1 else accumulation.window_for(self)
        if not window.sync_gradients:
            return
        if backend.reduces_gradients_at_step or accumulation.plugin.divide_by_actual:
            self.reduce_gradients()
        self._is_reduced = accumulation.are_gradients_reduced = False
        if self.steps_in_backward:
            pass
        elif closure is None and not self._precision.scales_gradients:
            self.optimizer.step()
        else:
            self._is_overflow = self._precision.step(self.optimizer, closure)
        if backend.is_lazy:
            backend.step_boundary()

    @property
    def is_due(self) -> bool:
        """Whether the optimizer steps in this micro-step, which it does when its models' accumulation window ends."""
        return self._accumulation.window_for(self).sync_gradients

    def reduce_gradients(self) -> None:
        """Average gradients over ranks once per step, on devices that don't do so in backward.

        With ``divide_by_actual``, also average them over the micro-steps of a short window.
        """
        if self._is_reduced:
            return
        if self._backend.reduces_gradients_at_step and not self._accumulation.are_gradients_reduced:
            self._backend.reduce_gradients(self.optimizer)
        if self._accumulation.plugin.divide_by_actual:
            self._divide_by_actual()
        self._is_reduced = True

    def _divide_by_actual(self) -> None:
        factor = self._accumulation.gradient_factor(self)
        if factor != 1.0:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)

    def has_any(self, wanted: Container[int]) -> bool:
        """Return whether the optimizer has any parameter with an id in ``wanted``."""
        return any(id(parameter) in wanted for group in self.param_groups for parameter in group["params"])

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler for fp16; None with other precisions."""
        return self._precision.scaler

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was skipped because fp16 gradients overflowed.

        A fused optimizer decides this on the device, so reading the property means waiting for the device.
        """
        return bool(self._is_overflow)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def __repr__(self) -> str:
        return f"AcceleratedOptimizer({self.optimizer!r})"


class AcceleratedScheduler:
    """A learning rate scheduler that follows its optimizers.

    Args:
        scheduler: the user's scheduler, kept as ``.scheduler``.
        optimizers: the prepared optimizers that it schedules.
        accumulation: decides when optimizers step.
        num_ranks: number of ranks that read different data. A schedule counts the steps of a single process, so the
            scheduler takes this many inner steps per optimizer step.
        step_with_optimizer: False: take exactly one inner step per call.
        split_batches: True: take one inner step, because a step of all ranks corresponds to one step of a single
            process.

    A :class:`~torch.optim.lr_scheduler.ReduceLROnPlateau` follows a metric instead of counting steps, so it takes one
    inner step per call.
    """

    gradient_state: Any
    """A view that the Accelerator adds for users. Nothing here reads it."""

    def __init__(
        self,
        scheduler: Any,
        optimizers: Sequence[AcceleratedOptimizer],
        accumulation: AccumulationState,
        num_ranks: int = 1,
        step_with_optimizer: bool = True,
        split_batches: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.optimizers = list(optimizers)
        self._accumulation = accumulation
        self._num_ranks = num_ranks
        self.step_with_optimizer = step_with_optimizer
        self.split_batches = split_batches
        self._is_accelerate_prepared = True

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step with the optimizers; do nothing if they did not step."""
        if not self.step_with_optimizer:
            self.scheduler.step(*args, **kwargs)
        elif not self._is_due():
            if self._accumulation.plugin.adjust_scheduler and hasattr(self.scheduler, "_step_count"):
                # torch warns if a scheduler seems to be ahead of its optimizer. Here, both skip the step.
                self.scheduler._step_count += 1
        elif not any(optimizer.step_was_skipped for optimizer in self.optimizers):
            for _ in range(self.steps_per_call):
                if not self._is_at_end():
                    self.scheduler.step(*args, **kwargs)

    @property
    def steps_per_call(self) -> int:
        """How many steps the inner scheduler takes in a call to :meth:`step`."""
        follows_metric = isinstance(self.scheduler, ReduceLROnPlateau)
        is_single = self.split_batches or follows_metric or not self.step_with_optimizer
        return 1 if is_single else self._num_ranks

    def _is_due(self) -> bool:
        answers = {optimizer.is_due for optimizer in self.optimizers}
        return answers.pop() if len(answers) == 1 else self._accumulation.sync_gradients

    def _is_at_end(self) -> bool:
        total_steps = getattr(self.scheduler, "total_steps", None)
        return isinstance(total_steps, int) and self.scheduler.last_epoch >= total_steps

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def get_last_lr(self) -> list[float]:
        """Return the learning rates of the last step, one per parameter group."""
        return list(self.scheduler.get_last_lr())

    def get_lr(self) -> list[float]:
        """Return the learning rates as torch's schedulers compute them."""
        return list(self.scheduler.get_lr())

    def print_lr(self, *args: Any, **kwargs: Any) -> None:
        """Print the learning rate, if the scheduler supports it."""
        self.scheduler.print_lr(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state."""
        self.scheduler.load_state_dict(state_dict)


def _has_misplaced_state(optimizer: torch.optim.Optimizer) -> bool:
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name != "step" and value.device != parameter.device:
                return True
    return False


class OptimizerPlaceholder:
    """A placeholder for an optimizer that the strategy creates: ``prepare`` returns the real one."""

    needs: str
    """The setting that the real optimizer needs, worded as the end of an error message."""


class SchedulerPlaceholder:
    """A placeholder for a learning rate scheduler that the strategy creates."""

    needs: str
    """As in :class:`OptimizerPlaceholder`."""
