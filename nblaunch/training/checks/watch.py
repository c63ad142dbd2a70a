"""Runs the checks: :class:`Watch` calls them in the first steps of a training run, and in a few later ones.

    steps of optimizers   0 ... 9      16 ... 21      32 ... 37      64 ... 69      128 ...

Between these windows, a backward pass costs one extra comparison of numbers, and an optimizer step costs nothing extra.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nblaunch import env
from nblaunch.context import ProcessContext
from nblaunch.errors import user_frame, warn
from nblaunch.training.checks import Check, Prepared
from nblaunch.training.checks.data import EqualNoise, SameSamples
from nblaunch.training.checks.gradients import (
    CollapsedScale,
    ForeignParameters,
    LateClipping,
    ScaledClipping,
    UnclearedGradients,
    measures_only,
    observe_torch,
)
from nblaunch.training.checks.hints import (
    DifferentOrders,
    EvalModeTraining,
    LossDividedTwice,
    MetricOfOneShare,
    NeverStepped,
    TrainModeEvaluation,
    UntrainedParameters,
)
from nblaunch.training.checks.replicas import DifferentReplicas, DifferentStatistics, StepsOnSomeRanks
from nblaunch.training.checks.schedules import ScheduledEpochs, ScheduledMicroSteps, ZeroLearningRate

CHECKS: tuple[type[Check], ...] = (
    UnclearedGradients, ForeignParameters, LateClipping, ScaledClipping, ZeroLearningRate, ScheduledMicroSteps,
    DifferentReplicas, DifferentStatistics, StepsOnSomeRanks, CollapsedScale,
    SameSamples, EqualNoise, LossDividedTwice, TrainModeEvaluation, EvalModeTraining,
    UntrainedParameters, NeverStepped, MetricOfOneShare, DifferentOrders, ScheduledEpochs,
)  # fmt: skip
"""All checks."""

_FIRST_WINDOW = 10
_WINDOW = 6
_NEVER = 1 << 62


class Watch:
    """Runs the checks of this process.

    ``NBLAUNCH_CHECKS=off`` turns all checks off; ``NBLAUNCH_CHECKS=-name`` turns off the named checks.

    Args:
        process: counts optimizer steps, and sends what the checks observe.
    """

    def __init__(self, process: ProcessContext) -> None:
        # An Accelerator in the notebook may keep a reference to the watch after an inline launch has ended.
        self._context = weakref.ref(process)
        self._slot = process.slot
        self._checks = [] if process.backend.is_lazy else [
            kind() for kind in CHECKS if not env.is_check_off(kind.name)
        ]  # fmt: skip
        for check in self._checks:
            check.send = self.report
        self._prepared: Prepared | None = None
        self._evaluated_alone: tuple[int | None, int] | None = None
        self._remove_hook: Callable[[], None] | None = None
        self._reported: set[str] = set()
        self._warnings: list[str] = []
        self.begin_anew()

    def begin_anew(self) -> None:
        """Examine the next steps, which are the first steps of a command."""
        self._num_looked_at = 0
        self.due_at = 0 if self._checks else _NEVER
        self._until = _FIRST_WINDOW

    @property
    def is_looking(self) -> bool:
        """Whether checks run in the current step."""
        return self._remove_hook is not None

    def before_backward(self, prepared: Prepared, loss: torch.Tensor, options: Mapping[str, Any]) -> None:
        """Run checks before a backward pass from ``loss``; called once optimizers have taken ``due_at`` steps."""
        # Without a launcher, nothing counts steps outside windows, so there is only the first window.
        num_steps = max(self._slot.num_updates, self._num_looked_at)
        if num_steps >= self._until:
            self._end_window(num_steps)
            return
        self._prepared = prepared
        if self._remove_hook is None:
            self._remove_hook = _add_hooks(self)
            self._call("begin_window")
        self._call("before_backward", prepared, loss, options)

    def before_clip(self, parameters: Sequence[torch.Tensor], max_norm: float | None) -> None:
        """Run checks before the Accelerator clips gradients of ``parameters``, by value if ``max_norm`` is None."""
        if self.is_looking and not measures_only(max_norm):
            gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
            self._call("before_clip", self._prepared, gradients, False)

    def before_loop(self) -> int | None:
        """Run checks before a loop over a prepared loader; return the number of collectives so far."""
        if self._prepared is not None:
            self._call("before_loop", self._prepared)
        return self.num_collectives()

    def num_collectives(self) -> int | None:
        """Return how many collectives this process has called; None if that is unknown."""
        process = self._context()
        return None if process is None or process.num_collectives is None else process.num_collectives()

    def after_evaluation(self, num_collectives: int | None) -> None:
        """Run checks after a loop over a prepared loader in which no optimizer stepped.

        Args:
            num_collectives: number of collectives when the loop began.
        """
        if self._prepared is not None:
            self._call("after_evaluation", self._prepared)
            is_alone = num_collectives is not None and num_collectives == self.num_collectives()
            self._evaluated_alone = (num_collectives, self._slot.num_updates) if is_alone else None

    def before_show(self, shown: Any) -> None:
        """Run checks before ``shown`` is printed or logged, unless a collective has run since the evaluation."""
        if self._evaluated_alone is None:
            return
        if self._evaluated_alone == (self.num_collectives(), self._slot.num_updates):
            self._call("before_show", self._prepared, shown)
        else:
            self._evaluated_alone = None

    def leave_out(self, model: torch.nn.Module) -> None:
        """Allow the weights of ``model`` to differ between ranks."""
        for check in self._checks:
            if isinstance(check, DifferentReplicas):
                check.left_out.add(model)

    def report(
        self, check: Check, problem: str, advice: str, value: Any, judged_by: str, step: int | None = None
    ) -> None:
        """Send a check's observation; without a launcher, warn if it needs no comparison with other ranks."""
        if judged_by == "itself" and check.name in self._reported:
            return
        self._reported.add(check.name)
        process = self._context()
        if process is None:
            return
        if not process.is_watched:
            if judged_by == "itself" and not check.is_hint:
                self._warnings.append(f"{problem}. {advice} (NBLAUNCH_CHECKS=-{check.name} silences this)")
            return
        step = self._slot.num_updates if step is None else step
        process.observe(
            check.name, problem, advice, user_frame(),
            step=step, value=value, judged_by=judged_by, is_hint=check.is_hint,
        )  # fmt: skip

    def _end_window(self, num_steps: int) -> None:
        if self._remove_hook is not None:
            self._remove_hook()
            self._remove_hook = None
        self.due_at = max(16, 1 << num_steps.bit_length())
        self._until = self.due_at + _WINDOW

    def _is_at_home(self) -> bool:
        """Return whether this process created the watch; a worker inherits the notebook's watch."""
        process = self._context()
        return process is not None and process.is_current

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        if not torch.compiler.is_compiling() and self._is_at_home():
            self._num_looked_at += 1
            if self._prepared is not None and not self._prepared.strategy.steps_by_engine:
                self._call("before_step", self._prepared, optimizer)

    def _before_torch_clips(self, gradients: Sequence[torch.Tensor]) -> None:
        # This hook remains after the window if other code has replaced torch's helper in the meantime.
        if self.is_looking and self._is_at_home():
            self._call("before_clip", self._prepared, gradients, True)

    def _call(self, method: str, *arguments: Any) -> None:
        """Call a method on every check. Drop a check that fails, because it must not end training."""
        for check in list(self._checks):
            try:
                getattr(check, method)(*arguments)
            except Exception:
                self._checks.remove(check)
        while self._warnings:
            warn(self._warnings.pop(0))  # raises if the user's filters turn warnings into errors


_ended: list[Callable[[], None]] = []
"""Functions that remove the hooks of watches that are gone. A hook can't remove itself while torch is calling hooks."""


def _add_hooks(watch: Watch) -> Callable[[], None]:
    """Make torch call ``watch`` before optimizer steps and clipping; return a function that stops these calls."""
    while _ended:
        _ended.pop()()
    reference = weakref.ref(watch)

    def note_clipping(gradients: Sequence[torch.Tensor]) -> None:
        living = reference()
        if living is not None:
            living._before_torch_clips(gradients)

    def call_watch(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        living = reference()
        if living is not None:
            living._before_step(optimizer)
        elif remove not in _ended:
            _ended.append(remove)

    def remove() -> None:
        handle.remove()
        end_observation()

    handle = register_optimizer_step_pre_hook(call_watch)
    end_observation = observe_torch(note_clipping)
    return remove
