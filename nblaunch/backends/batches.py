"""Batches as devices see them: tensors in nested containers, and their shapes in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


def tensors(data: Any) -> Iterator[Any]:
    """The tensors in nested lists, tuples and mappings."""
    if hasattr(data, "shape") and hasattr(data, "dtype"):
        yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from tensors(value)
    elif isinstance(data, (list, tuple)):
        for item in data:
            yield from tensors(item)


def shapes_in_words(shapes: Iterable[Sequence[int]]) -> str:
    """``32x64, 32, scalar``; empty for none."""
    return ", ".join("x".join(map(str, shape)) or "scalar" for shape in shapes)
