"""Batches from any library: their sizes, and the digests that ranks use to compare what they read.

Only lists, tuples and mappings are searched for tensors, because reading another object could run arbitrary code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_MAX_TENSORS, _NUM_ELEMENTS = 8, 64  # per batch, and per tensor or row


def num_rows(batch: Any) -> int:
    """Return the number of rows in a batch: the first dimension of its first tensor or array; 0 if there is none."""
    shape = getattr(batch, "shape", None)
    if isinstance(shape, tuple):
        return shape[0] if shape and isinstance(shape[0], int) else 0
    return next((rows for rows in map(num_rows, _parts(batch)) if rows), 0)


def num_elements(batch: Any) -> int:
    """Return the number of elements in a batch's largest tensor or array; 0 if there is none."""
    shape = getattr(batch, "shape", None)
    if isinstance(shape, tuple):
        return math.prod(size for size in shape if isinstance(size, int))
    return max(map(num_elements, _parts(batch)), default=0)


def digest(batch: Any) -> int | None:
    """Return a digest of a few numbers in a batch, equal in all processes; None if the numbers are all the same."""
    values: list[float] = []
    for tensor in _tensors(batch):
        values += numbers(tensor, _NUM_ELEMENTS)
    return hash(tuple(values)) if len(set(values)) > 1 else None


def row_digests(batch: Any, max_rows: int) -> list[int]:
    """Return digests of the first rows of a batch. Equal rows have equal digests in all processes.

    The batch that contains a row does not affect its digest, unless batches are padded to different lengths.
    """
    tensors = [tensor for tensor in _tensors(batch) if tensor.dim()]
    if not tensors or len({len(tensor) for tensor in tensors}) > 1 or not tensors[0].numel():
        return []
    columns = []
    for tensor in tensors:
        rows = tensor.detach()[:max_rows].reshape(min(len(tensor), max_rows), -1)
        step = max(1, rows.shape[1] // _NUM_ELEMENTS)
        columns.append(rows[:, ::step][:, :_NUM_ELEMENTS].double().tolist())
    return [hash(tuple(map(tuple, row))) & 0xFFFFFFFF for row in zip(*columns, strict=True)]


def numbers(tensor: Any, count: int) -> list[float]:
    """Return up to ``count`` evenly spaced numbers from a tensor."""
    flat = tensor.detach().reshape(-1)
    values: list[float] = flat[:: max(1, len(flat) // count)][:count].double().tolist()
    return values


def _tensors(batch: Any) -> list[Any]:
    values: list[Any] = []
    _collect_tensors(batch, values)
    return values[:_MAX_TENSORS]


def _collect_tensors(batch: Any, values: list[Any]) -> None:
    import torch

    if isinstance(batch, torch.Tensor):
        is_sharded = hasattr(batch, "device_mesh")  # reading a DTensor would gather its shards
        if batch.layout is torch.strided and not batch.is_complex() and not is_sharded:
            values.append(batch)
        return
    for part in _parts(batch):
        _collect_tensors(part, values)


def _parts(batch: Any) -> Any:
    return batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else ()
