"""Comparisons of values with what they were when the function started.

A comparison is made before the function runs. It keeps no copy of the value, only its size, torch's count of changes,
or a sum. Afterwards, it answers whether a container has grown, an array of zeros has other elements, or a tensor has
changed.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from nblaunch.user_code import module_of

HasChanged = Callable[[Any], bool]
"""Returns whether the present value differs from the earlier one."""

CONTAINERS = (list, dict, set, deque)

_ITERATED = (list, tuple, dict)
_MAX_ELEMENTS = 1 << 16
_MAX_TENSORS = 2000
_MAX_SUMMED = 1 << 20
"""Largest number of tensor elements that are summed in all, which may take 0.2 s on a slow machine."""


class Comparisons:
    """Makes the comparisons of a call.

    Args:
        is_forked: whether this worker may share memory with the kernel.
    """

    def __init__(self, is_forked: bool) -> None:
        self._is_forked = is_forked
        self._to_sum = _MAX_SUMMED
        self._torch: Any = sys.modules.get("torch")

    def of(self, value: Any, *, is_attribute: bool) -> HasChanged | None:
        """Return the comparison with a value as it is now; None if the value can't keep values."""
        try:
            if is_attribute or self._is_trainable(value):
                has_changed = self.of_tensors(value)
                if has_changed is not None:
                    return has_changed
            if isinstance(value, CONTAINERS):
                return _of_container(value)
            return _is_filled if self._is_array(value) and not _is_filled(value) else None
        except Exception:  # for example, a sparse tensor has no memory to ask about
            return None

    def _is_array(self, value: Any) -> bool:
        if module_of(type(value)) == "numpy":
            is_own = type(value).__name__ == "ndarray" and (not self._is_forked or _owns_memory(value))
            return is_own and 0 < value.size <= _MAX_ELEMENTS and value.dtype.kind in "biufc"
        if module_of(type(value)) == "torch":
            is_own = (
                type(value).__name__ == "Tensor" and value.device.type == "cpu" and not value.requires_grad
            )
            return is_own and 0 < value.numel() <= _MAX_ELEMENTS and not value.is_shared()
        return False

    def _is_trainable(self, value: Any) -> bool:
        """Return whether a value is a parameter, or a container that begins with one."""
        first = next(iter(_elements(value)), value)
        return self._torch is not None and isinstance(first, self._torch.nn.Parameter)

    def of_tensors(self, value: Any) -> HasChanged | None:
        """Return the comparison with a tensor, or a container of tensors; None for other values."""
        is_container = isinstance(value, _ITERATED)
        tensors = _elements(value) if is_container else [value]
        if self._torch is None or not 0 < len(tensors) <= _MAX_TENSORS:
            return None
        if not all(isinstance(each, self._torch.Tensor) and not each.is_shared() for each in tensors):
            return None
        before = [_Tensor(each, is_summed=self._may_sum(each)) for each in tensors]

        def has_changed(value: Any) -> bool:
            present = _elements(value) if is_container else [value]
            return len(present) > len(before) or any(map(_Tensor.has_changed, before, present))

        return has_changed

    def _may_sum(self, tensor: Any) -> bool:
        is_summed = (
            tensor.device.type == "cpu"
            and tensor.numel() <= min(_MAX_ELEMENTS, self._to_sum)
            and tensor.dtype.is_floating_point
        )
        self._to_sum -= tensor.numel() if is_summed else 0
        return is_summed


def of_optimizer(optimizer: Any) -> HasChanged:
    """Return the comparison with the state and the learning rates of an optimizer."""

    def state() -> list[Any]:
        tensors = [
            part
            for of_one in optimizer.state.values()
            for part in (of_one, *_elements(of_one))
            if hasattr(part, "_version")
        ]
        return [*(each._version for each in tensors), *(group.get("lr") for group in optimizer.param_groups)]

    before = state()
    return lambda _: state() != before


def _of_container(value: Any) -> HasChanged:
    was_empty, size = _is_empty(value), _num_kept(value)
    return lambda value: _num_kept(value) > size or (was_empty and not _is_empty(value))


def _num_kept(value: Any) -> int:
    """Return the number of elements. A dictionary may hold options, so only its containers count."""
    if isinstance(value, dict):
        return sum(len(part) for part in value.values() if isinstance(part, CONTAINERS))
    return len(value)


def _is_empty(value: Any) -> bool:
    if isinstance(value, dict):
        return all(is_unset(part) or (isinstance(part, CONTAINERS) and not part) for part in value.values())
    # This includes a list of zeros, one for each epoch.
    if type(value) is list and len(value) <= _MAX_ELEMENTS:
        return all(type(part) in (int, float) and is_unset(part) for part in value)
    return not value


def is_unset(value: Any) -> bool:
    """Return whether a value is None, or a number with which a sum or a search for the best value begins."""
    return value is None or (type(value) in (bool, int, float) and value in (0, math.inf, -math.inf))


def _is_filled(array: Any) -> bool:
    return bool(array.any())


def _owns_memory(array: Any) -> bool:
    """Return whether an array, or the array of which it is a view, is not a part of a file or of shared memory."""
    while type(array.base) is type(array):
        array = array.base
    return bool(array.flags.owndata)


class _Tensor:
    """The state of a tensor at the start of the function: torch's count of changes, and the sum of the elements.

    The sum is needed because changes through ``tensor.data`` bypass the count.

    Args:
        tensor: the tensor, which this object doesn't keep alive.
        is_summed: whether to compute the sum.
    """

    def __init__(self, tensor: Any, *, is_summed: bool) -> None:
        self._tensor, self._is_summed = weakref.ref(tensor), is_summed
        self._form = tensor.shape, tensor.device
        self._version = self._version_of(tensor)

    def has_changed(self, present: Any) -> bool:
        """Return whether a tensor is the changed tensor, or a new tensor in its place, as in an average of weights."""
        if present is self._tensor():
            return self._version_of(present) != self._version
        return (getattr(present, "shape", None), getattr(present, "device", None)) == self._form

    def _version_of(self, tensor: Any) -> tuple[int, float]:
        total = float(tensor.detach().double().abs().sum()) if self._is_summed else 0.0
        return tensor._version, 0.0 if math.isnan(total) else total  # NaN differs from itself


def _elements(value: Any) -> list[Any]:
    """Return the elements of a list, tuple or dictionary; an empty list for any other value."""
    if type(value) in (list, tuple):
        return list(value)
    return list(value.values()) if type(value) is dict else []
