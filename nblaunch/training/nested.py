"""Walking nested batches and outputs: lists, tuples, named tuples and mappings of tensors.

Structure and types are kept; leaves are replaced. Nothing here communicates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def rebuild(original: Any, items: list[Any]) -> Any:
    """A sequence of the type of ``original`` with other items; named tuples keep their class."""
    cls = type(original)
    return cls(*items) if hasattr(original, "_fields") else cls(items)


def map_leaves(function: Callable[[Any], Any], data: Any) -> Any:
    """Replace every leaf of ``data`` by ``function(leaf)``. Leaves are all but lists, tuples and mappings."""
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, (list, tuple)):
        return rebuild(data, [map_leaves(function, item) for item in data])
    if isinstance(data, Mapping):
        # A plain-dict constructor is the one thing that dict, OrderedDict, UserDict and model outputs share.
        return type(data)({key: map_leaves(function, value) for key, value in data.items()})  # type: ignore[call-arg]
    return function(data)


def leaves(data: Any) -> Iterator[Any]:
    """The leaves of ``data`` in order."""
    if isinstance(data, (list, tuple)):
        for item in data:
            yield from leaves(item)
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from leaves(value)
    else:
        yield data


def to_device(data: Any, device: torch.device, non_blocking: bool = False) -> Any:
    """``data`` with every leaf that has a ``to`` on ``device``; other leaves as they are.

    An object with its own ``to`` (a tokenizer's batch, a graph) is moved by it as a whole, even if it is a mapping.
    """
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=non_blocking)
    if hasattr(data, "to") and not isinstance(data, (list, tuple)):
        try:
            return data.to(device, non_blocking=non_blocking)
        except TypeError:  # a ``to`` that knows no ``non_blocking``
            return data.to(device)
    if isinstance(data, (list, tuple)):
        return rebuild(data, [to_device(item, device, non_blocking) for item in data])
    if isinstance(data, Mapping):
        moved = {key: to_device(value, device, non_blocking) for key, value in data.items()}
        return type(data)(moved)  # type: ignore[call-arg]
    return data


def to_fp32(data: Any) -> Any:
    """``data`` with fp16 and bf16 tensors converted to fp32; everything else as it is."""
    return map_leaves(_leaf_to_fp32, data)


def _leaf_to_fp32(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.float16, torch.bfloat16):
        return leaf.float()
    return leaf


def count_rows(batch: Any) -> int:
    """Samples in a batch: the first dimension of its first tensor; 0 where there is no tensor.

    Called at every step, so it stops at the first tensor and builds nothing.
    """
    while True:
        if isinstance(batch, torch.Tensor):
            return batch.shape[0] if batch.ndim else 1
        if isinstance(batch, Mapping):
            batch = next(iter(batch.values()), None)
        elif isinstance(batch, (list, tuple)) and batch:
            batch = batch[0]
        else:
            return 0
