"""Checks for learning rates that stay at zero, change without an optimizer step, or change too much in an epoch."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from nblaunch.training.checks import Check, Prepared, Streaks

_NUM_ZERO = 5  # consecutive steps; a warm-up from 0 has one
_NUM_WINDOWS = 2
_MIN_STEPS = 3  # optimizer steps for each step of a scheduler


class ZeroLearningRate(Check):
    """All groups of an optimizer have a learning rate of 0, and no other optimizer steps with a nonzero one."""

    name = "zero_learning_rate"

    def begin_window(self) -> None:
        self._streaks = Streaks()
        # Optimizers that change weights.
        self._others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()

    def before_step(self, prepared: Prepared, optimizer: torch.optim.Optimizer) -> None:
        rates = _rates(optimizer)
        is_zero = bool(rates) and not any(rates)
        (self._others.discard if is_zero else self._others.add)(optimizer)
        # Two optimizers may take turns, or a rate of 0 may freeze the layers of one of them for a while.
        if self._streaks.add(optimizer, is_zero) >= _NUM_ZERO and not self._others:
            self.report(
                f"the learning rate of the {type(optimizer).__name__} was 0 for {_NUM_ZERO} steps, so these changed "
                "nothing",
                "Check the scheduler. A prepared scheduler advances by the number of ranks in each step, so its total "
                "must count the batches of all ranks: compute the total from the length of the loader before prepare",
            )


class ScheduledMicroSteps(Check):
    """An unprepared scheduler advances in every micro-step, although the optimizer steps only at the window's end."""

    name = "scheduler_per_micro_step"

    def begin_window(self) -> None:
        self._rates: dict[int, list[float]] = {}
        self._num_windows = 0
        self._is_counted = True

    def before_backward(self, prepared: Prepared, loss: torch.Tensor, options: Mapping[str, Any]) -> None:
        if prepared.accumulation.num_steps == 1:
            return
        owned = {
            id(wrapper.scheduler.optimizer)
            for wrapper in prepared.schedulers
            if hasattr(wrapper.scheduler, "optimizer")
        }
        optimizers = [wrapper.optimizer for wrapper in prepared.optimizers]
        for optimizer in optimizers:
            is_loose = _has_scheduler(optimizer) and id(optimizer) not in owned
            before, now = self._rates.get(id(optimizer)), _rates(optimizer)
            self._rates[id(optimizer)] = now
            if is_loose and not self._is_counted and before is not None and before != now:
                self._is_counted = True  # once for each window
                self._num_windows += 1
                if self._num_windows == _NUM_WINDOWS:
                    self.report(
                        f"the learning rate of the {type(optimizer).__name__} changes between the micro-steps of an "
                        "accumulation window, because its scheduler advances in each micro-step",
                        "Pass the scheduler to accelerator.prepare(), or step it only if accelerator.sync_gradients",
                    )

    def before_step(self, prepared: Prepared, optimizer: torch.optim.Optimizer) -> None:
        self._rates.clear()
        self._is_counted = False


class ScheduledEpochs(Check):
    """A prepared scheduler is stepped once per epoch, but advances by several epochs.

    The user may have computed the schedule for that.
    """

    name = "scheduler_per_epoch"
    is_hint = True

    def __init__(self) -> None:
        self._num_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._first: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def before_step(self, prepared: Prepared, optimizer: torch.optim.Optimizer) -> None:
        self._num_steps[optimizer] = self._num_steps.get(optimizer, 0) + 1
        for wrapper in prepared.schedulers:
            self._first.setdefault(wrapper, getattr(wrapper.scheduler, "last_epoch", 0))

    def before_loop(self, prepared: Prepared) -> None:
        for wrapper, first in self._first.items():
            num_calls = (getattr(wrapper.scheduler, "last_epoch", 0) - first) // wrapper.steps_per_call
            num_steps = max(
                (self._num_steps.get(each.optimizer, 0) for each in wrapper.optimizers), default=0
            )
            if wrapper.steps_per_call > 1 and 0 < num_calls * _MIN_STEPS <= num_steps:
                self.report(
                    f"the {type(wrapper.scheduler).__name__} is stepped once per epoch, but advances by "
                    f"{wrapper.steps_per_call} steps each time, because a prepared scheduler advances by the number "
                    "of ranks",
                    "If the schedule counts epochs, create Accelerator(step_scheduler_with_optimizer=False), or do "
                    "not pass the scheduler to accelerator.prepare()",
                )


def _rates(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the learning rates of all groups; an empty list if the optimizer chooses them itself."""
    rates = [group.get("lr") for group in optimizer.param_groups]
    return [] if None in rates else [float(rate or 0) for rate in rates]


def _has_scheduler(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer has a torch scheduler, which marks the optimizer's ``step``."""
    return any(hasattr(optimizer.step, mark) for mark in ("_wrapped_by_lr_sched", "_with_counter"))
