"""Loss scaling for fp16: one gradient scaler, and several optimizers that share it, by :class:`LossScaling`.

torch's scaler wants one ``update`` per round of backward passes and steps, after the steps of all optimizers: it may
change the scale, which those that have not stepped yet still need, and it forgets whose gradients were unscaled. When
a round is over, is decided here:

    backward   unscale(a) unscale(b)   step(a)   step(b)   -> update
    backward   unscale(a)   step(a)   backward   ...       -> update before the second backward
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from nblaunch.training.collectives import dtensor


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
