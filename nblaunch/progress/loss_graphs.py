"""Reads the graph of a loss: the division that ends it, and a parameter that shows whether a step was taken.

torch's hooks count the steps of its optimizers. Loops that subtract gradients by hand, and libraries with their own
optimizers, such as Keras, do not use torch's optimizers. A parameter that has changed since the last backward pass
shows that a step was taken.
"""

from __future__ import annotations

from typing import Any

from nblaunch.weights import is_sharded
from nblaunch.wire.board import Slot

_MAX_NODES = 256  # in a graph


def divisor_of(loss: Any) -> float:
    """Return the divisor of a loss's last operation; 1 if that was not a division."""
    made_by = loss.grad_fn
    if made_by is None or made_by.name() != "DivBackward0":
        return 1.0
    other: Any = getattr(made_by, "_saved_other", None)
    return float(other) if getattr(other, "ndim", 1) == 0 and other.device.type == "cpu" else 1.0


class OwnUpdates:
    """Counts the steps of code without a torch optimizer, until a torch optimizer steps.

    Args:
        slot: counts the steps of optimizers.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._num_steps = slot.updates
        self._parameter: Any = None
        self._state: Any = None

    @property
    def is_needed(self) -> bool:
        """Whether no torch optimizer has stepped."""
        return self._slot.updates == self._num_steps

    def remember(self, loss: Any) -> None:
        """Remember the state of a parameter on which ``loss`` depends."""
        if self.is_needed:
            self._parameter = _parameter_of(loss)
            self._state = _state_of(self._parameter)

    def take(self) -> bool:
        """Return whether the parameter has changed since :meth:`remember`, and count the step."""
        if self._parameter is None or not self.is_needed:
            self._parameter = None
            return False
        state = _state_of(self._parameter)
        is_changed = state is not None and state != self._state
        self._parameter = None
        if is_changed:
            self._slot.num_updates += 1
            self._num_steps += 1
        return is_changed


def _state_of(parameter: Any) -> Any:
    """Return a value that changes when ``parameter`` is updated in place, even through ``parameter.data``.

    Return None if there is no parameter, or if ``fully_shard`` has freed its memory until the next forward pass.
    """
    import torch

    if isinstance(parameter, torch.Tensor) and is_sharded(parameter):
        parameter = parameter.detach().to_local()  # type: ignore[attr-defined]
    if parameter is None or not parameter.untyped_storage().size():
        return None
    is_plain = type(parameter) in (torch.Tensor, torch.nn.Parameter) and parameter.is_cpu
    first = parameter.detach().reshape(-1)[:1].tolist() if is_plain else None
    return parameter._version, parameter.data_ptr(), first


def _parameter_of(loss: Any) -> Any:
    """Return the first parameter that is found in the graph of ``loss``; None if there is none."""
    nodes, seen = [loss.grad_fn], 0
    while nodes and seen < _MAX_NODES:
        node = nodes.pop()
        seen += 1
        nexts = [following for following, _ in node.next_functions if following is not None] if node else []
        for following in nexts:
            if hasattr(following, "variable"):
                return following.variable
        nodes += reversed(nexts)
    return None
