"""Optimizer and scheduler of a DeepSpeed engine, as a person's loop calls them: their step is the engine's.

The engine clips, steps, clears gradients and moves its own schedule on in one call, which is made where the loop says
``optimizer.step()``.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

from nblaunch.backends.base import Backend
from nblaunch.training.accumulation import GradientSync
from nblaunch.training.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from nblaunch.training.precision import Precision


class EngineOptimizer(AcceleratedOptimizer):
    """An engine's optimizer. What it has, ``param_groups`` for one, is that of the engine's part on this rank.

    Args:
        engine: DeepSpeed's, with an optimizer.
        step: steps the engine; returns whether the step was left out because gradients overflowed.
        gradients: says when to step.
        precision: of the process.
        backend: told of every step.
    """

    def __init__(
        self,
        engine: Any,
        step: Callable[[], bool],
        gradients: GradientSync,
        precision: Precision,
        backend: Backend,
    ) -> None:
        super().__init__(engine.optimizer, gradients, precision, backend, place_state=False)
        self.engine = engine
        self._step_engine = step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the engine clears gradients where it has stepped."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step the engine; nothing in the middle of an accumulation window.

        Raises:
            ValueError: a closure was given.
        """
        if closure is not None:
            raise ValueError("DeepSpeed's engine takes no closure: call optimizer.step() without one")
        if self._gradients.sync_gradients:
            self._is_overflow = self._step_engine()
            self._backend.step_boundary()

    def reduce_gradients(self, wanted: Container[int] | None = None) -> None:
        """Nothing: the engine averages gradients in backward."""

    def __repr__(self) -> str:
        return f"EngineOptimizer({self.optimizer!r})"


class EngineScheduler(AcceleratedScheduler):
    """A scheduler that the engine moves on with each of its steps.

    Args:
        scheduler: the engine's.
        optimizer: of the same engine.
        gradients: of the process.
    """

    def __init__(self, scheduler: Any, optimizer: EngineOptimizer, gradients: GradientSync) -> None:
        super().__init__(scheduler, [optimizer], gradients)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the engine does it."""
