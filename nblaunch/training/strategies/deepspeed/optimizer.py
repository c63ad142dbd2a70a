"""Optimizer and scheduler of a DeepSpeed engine, as the user's loop calls them.

The engine clips, steps, clears gradients and moves its own schedule on in one call, which is made where the loop calls
``optimizer.step()``.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from nblaunch.backends.base import Backend
from nblaunch.training.accumulation import AccumulationState
from nblaunch.training.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from nblaunch.training.precision import Precision


class EngineOptimizer(AcceleratedOptimizer):
    """A prepared optimizer that an engine steps. Its ``param_groups`` and state are those of this rank's shard.

    Args:
        engine: DeepSpeed's, with an optimizer.
        step: steps the engine; returns whether the step was left out because gradients overflowed.
        accumulation: says when to step.
        precision: of the process.
        backend: notified of every step.
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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine clears gradients where it has stepped."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step the engine; nothing in the middle of an accumulation window.

        Raises:
            ValueError: a closure was given.
        """
        if closure is not None:
            raise ValueError("DeepSpeed's engine takes no closure: call optimizer.step() without one")
        if self._accumulation.sync_gradients:
            self._is_overflow = self._step_engine()
            self._backend.step_boundary()

    def reduce_gradients(self, wanted: Container[int] | None = None) -> None:
        """Do nothing: the engine averages gradients in backward."""

    def __repr__(self) -> str:
        return f"EngineOptimizer({self.optimizer!r})"


class EngineScheduler(AcceleratedScheduler):
    """A prepared scheduler that the engine steps with each of its own steps.

    Args:
        scheduler: the engine's.
        optimizer: of the same engine.
        accumulation: of the process.
    """

    def __init__(self, scheduler: Any, optimizer: EngineOptimizer, accumulation: AccumulationState) -> None:
        super().__init__(scheduler, [optimizer], accumulation)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine steps its scheduler."""


# Names of Accelerate, by which trainers recognise what an engine moves on.
DeepSpeedOptimizerWrapper = EngineOptimizer
DeepSpeedSchedulerWrapper = EngineScheduler
