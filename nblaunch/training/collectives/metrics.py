"""``gather_for_metrics``: gathers what the ranks computed for their batches, and includes each sample of the dataset
exactly once.

    rank 0    {"scores": rows 0 1, "texts": ["a", "b"]}  ┐
    rank 1    {"scores": rows 2 0, "texts": ["c", "a"]}  ┴─> {"scores": rows 0 1 2, "texts": ["a", "b", "c"]}

Loaders complete the last batch of an epoch with samples from the epoch's start. Real samples come first in the gathered
rows, so the added samples are cut off at the end. Whether an item is cut depends on how many rows it has:

    as many rows as the completed batch has samples   one row per sample; cut
    one row per rank                                  a value of the rank's batch, such as a loss; all rows are kept
    any other number                                  an error, because the rows can't be assigned to samples

Tensors are gathered as tensors. Other objects, in addition to or instead of tensors, are pickled:

    a sequence of objects, a list of dicts            one item per sample; becomes one list with the items of all ranks
    a NumPy array with dimensions                     rows, as in a tensor; inside a structure, it stays an array. In
                                                      a list that contains only arrays, each array is an object
    another object, such as a number or a string      a value of the rank; becomes a list with one item per rank
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import torch

from nblaunch import formatting
from nblaunch.errors import DistributedOperationException, warn
from nblaunch.training.accumulation import AccumulationState
from nblaunch.training.collectives import nested, operations


def gather_for_metrics(
    data: Any, use_gather_object: bool, accumulation: AccumulationState, num_data_ranks: int | None = None
) -> Any:
    """Gather what ranks computed for their batches; see ``Accelerator.gather_for_metrics``.

    Args:
        data: see ``Accelerator.gather_for_metrics``.
        use_gather_object: see ``Accelerator.gather_for_metrics``.
        accumulation: knows the current loader.
        num_data_ranks: number of ranks with different data; several ranks may share data. None: all ranks.

    Raises:
        ValueError: samples were added to the last batch, and a part of ``data`` can't be cut.
    """
    num_ranks = num_data_ranks or operations.world_size()
    num_alike = operations.world_size() // num_ranks
    is_object = use_gather_object or not all(isinstance(leaf, torch.Tensor) for leaf in nested.leaves(data))
    if is_object:
        if not use_gather_object:
            operations.check_that_all_have_objects()
        gathered = _gather_objects(data, use_gather_object, num_alike)
    else:
        gathered = operations.gather(data)
        if num_alike > 1:
            gathered = nested.map_tensors(lambda rows: _rows_of_data_ranks(rows, num_alike), gathered)
    tail = _tail_of(accumulation, num_ranks)
    if tail is not None:
        gathered = tail.cut(gathered)
    return nested.map_leaves(_as_list, gathered) if is_object else gathered


def _as_list(leaf: Any) -> Any:
    return list(leaf) if isinstance(leaf, _Column) else leaf


def _rows_of_data_ranks(gathered: torch.Tensor, num_alike: int) -> torch.Tensor:
    """Return the rows of every ``num_alike``-th rank; the ranks between them have the same data."""
    parts = gathered.reshape(operations.world_size(), -1, *gathered.shape[1:])
    return parts[::num_alike].flatten(0, 1)


# --- structures with objects ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Slot(nested.Leaf):
    """A placeholder for a tensor in a structure whose other parts are pickled."""

    position: int


class _Column(nested.Leaf, list[Any]):
    """Items of all ranks."""


class _PerRank(_Column):
    """One value of each rank."""


def _gather_objects(data: Any, use_gather_object: bool, num_alike: int) -> Any:
    if operations.world_size() == 1:
        return data
    if _is_iterable_leaf(data) or _is_column(data, use_gather_object):
        return _Column(_items_of_data_ranks(data, num_alike))
    tensors: list[torch.Tensor] = []
    structure = _without_tensors(data, tensors, use_gather_object)
    everyones = operations.gather_object([structure])[::num_alike]
    _check_structures(everyones)
    gathered = [
        _rows_of_data_ranks(rows, num_alike) if num_alike > 1 else rows for rows in operations.gather(tensors)
    ]
    return _merged(everyones, gathered)


def _items_of_data_ranks(data: Any, num_alike: int) -> list[Any]:
    if num_alike == 1:
        return list(operations.gather_object(data))
    return [item for items in operations.gather_object([data])[::num_alike] for item in items]


def _is_iterable_leaf(data: Any) -> bool:
    """Return whether ``data`` is an iterable leaf rather than a nested container. Tensors, arrays and sets are such
    leaves.
    """
    if isinstance(data, torch.Tensor):
        return bool(data.ndim)
    is_leaf = nested.children(data) is None and not isinstance(data, (str, bytes, bytearray))
    # Iterating over a table, such as a DataFrame, returns names, not rows.
    return (
        is_leaf and isinstance(data, Iterable) and not hasattr(data, "keys") and getattr(data, "ndim", 1) > 0
    )


def _is_column(data: Any, use_gather_object: bool) -> bool:
    """Return whether ``data`` has one object per sample, rather than several columns."""
    parts = nested.children(data)
    if parts is None or isinstance(data, Mapping) or _is_record(data):
        return False
    if use_gather_object:
        return True
    if isinstance(data, tuple) and any(map(_is_array, parts)):
        return False  # arrays in a tuple are columns, as tensors are; a list may have one array per sample
    if not any(isinstance(part, torch.Tensor) or nested.children(part) is not None for part in parts):
        return True
    # Each dict in a sequence belongs to one sample; lists in a tuple may be columns.
    kinds = {tuple(part) if isinstance(part, Mapping) else type(part) for part in parts}
    is_uniform = len(kinds) == 1 and not isinstance(parts[0], torch.Tensor)
    return is_uniform and (isinstance(parts[0], Mapping) or not isinstance(data, tuple))


def _is_record(data: Any) -> bool:
    """Return whether ``data`` has named fields, as a named tuple or a dataclass does."""
    is_sequence = isinstance(data, Sequence)
    return nested.is_namedtuple(data) or (not is_sequence and nested.children(data) is not None)


def _without_tensors(data: Any, tensors: list[torch.Tensor], use_gather_object: bool) -> Any:
    """Append the tensors in ``data`` to ``tensors``; return ``data`` with ``_Slot`` and ``_Column`` objects."""
    if isinstance(data, torch.Tensor):
        if use_gather_object:
            return _Column(data) if data.ndim else data
        tensors.append(data)
        return _Slot(len(tensors) - 1)
    parts = nested.children(data)
    if parts is None:
        return data
    if _is_column(data, use_gather_object):
        return _Column(data)
    return nested.rebuilt(data, [_without_tensors(part, tensors, use_gather_object) for part in parts])


def _check_structures(everyones: Sequence[Any]) -> None:
    described = [_describe(structure) for structure in everyones]
    if len(set(described)) > 1:
        listing = "".join(f"\n  rank {rank}: {text}" for rank, text in enumerate(described))
        raise DistributedOperationException(
            f"the structures that ranks passed to gather_for_metrics don't match:{listing}"
        )


def _describe(structure: Any) -> str:
    parts = nested.children(structure)
    if parts is None:
        if isinstance(structure, _Slot):
            return "a tensor"
        if _is_array(structure):
            return "an array"
        return "objects" if isinstance(structure, _Column) else "an object"
    described = [_describe(part) for part in parts]
    if isinstance(structure, Mapping):
        described = [f"{key}: {text}" for key, text in zip(structure, described, strict=True)]
    return f"{type(structure).__name__}({', '.join(described)})"


def _merged(everyones: Sequence[Any], gathered: Sequence[torch.Tensor]) -> Any:
    """Merge the structures of all ranks, which have the same form, into one."""
    first = everyones[0]
    if isinstance(first, _Slot):
        return gathered[first.position]
    if isinstance(first, _Column):
        return _Column(item for column in everyones for item in column)
    if isinstance(first, Mapping):
        return nested.rebuilt(first, [_merged([part[key] for part in everyones], gathered) for key in first])
    parts = nested.children(first)
    if parts is None and _is_array(first):
        return _joined(everyones)
    if parts is None:
        return None if all(part is None for part in everyones) else _PerRank(everyones)
    columns = zip(*(nested.children(part) or () for part in everyones), strict=True)
    return nested.rebuilt(first, [_merged(column, gathered) for column in columns])


def _is_array(leaf: Any) -> bool:
    """Return whether ``leaf`` is a NumPy array with rows."""
    return type(leaf).__module__ == "numpy" and getattr(leaf, "ndim", 0) > 0


def _joined(arrays: Sequence[Any]) -> Any:
    """Return the rows of all ranks' arrays as one array."""
    import numpy as np

    try:
        return np.concatenate(arrays)
    except ValueError as error:
        raise DistributedOperationException(
            f"gather_for_metrics can't join the ranks' arrays, whose shapes are {[array.shape for array in arrays]}: "
            f"{error}. If the arrays' rows differ in shape, pass lists instead"
        ) from error


# --- the last batch ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Tail:
    """The last batch of all ranks.

    Args:
        samples: number of real samples.
        completed: number of samples including padding. In a single process, which adds no padding, the number of rows
            in a full batch. 0: unknown.
        num_ranks: number of ranks with different data.
        is_short: whether the batch stayed short, because no samples were added.
    """

    samples: int
    completed: int
    num_ranks: int
    is_short: bool

    def cut(self, gathered: Any) -> Any:
        """Return the gathered data without the added samples."""
        if isinstance(gathered, torch.Tensor):
            return self._cut_tensor(gathered)
        parts = nested.children(gathered)
        if parts is None or (self.is_short and _is_column(gathered, False)):
            return self._cut_items(gathered)
        if isinstance(gathered, Sequence) and not isinstance(gathered, tuple):
            self._check_columns(gathered, parts)
        return nested.rebuilt(gathered, [self.cut(part) for part in parts])

    def _check_columns(self, gathered: Any, parts: Sequence[Any]) -> None:
        """Raise ValueError if the parts of a list may be samples instead of columns.

        Tensors with one row per sample are columns, as in ``[predictions, labels]``.
        """
        per_rank = self.completed // self.num_ranks
        if self.is_short or not len(parts) == per_rank > 1 or all(map(self._has_a_row_per_sample, parts)):
            return
        is_single = all(map(self._is_of_ranks, parts))
        if is_single or len({_kind(part) for part in parts}) == 1:
            kind = "tensor" if isinstance(parts[0], torch.Tensor) else type(parts[0]).__name__
            raise self._unclear(f"a list of {len(parts)} {kind}s{' with one row' if is_single else ''}")

    def _has_a_row_per_sample(self, part: Any) -> bool:
        return isinstance(part, torch.Tensor) and part.ndim > 0 and len(part) == self.completed

    def _is_of_ranks(self, part: Any) -> bool:
        return isinstance(part, torch.Tensor) and part.ndim > 0 and len(part) == self.num_ranks

    def _cut_tensor(self, rows: torch.Tensor) -> torch.Tensor:
        if not rows.ndim or not self._is_cut(len(rows), f"a tensor of shape {list(rows.shape)}"):
            return rows
        if self.is_short and self.completed % self.samples == 0 and not bool((rows == rows[:1]).all()):
            # Each sample may have several rows, or the user may have padded the tensor.
            raise self._unclear(f"a tensor of shape {list(rows.shape)}")
        return rows[: self.samples]

    def _cut_items(self, items: Any) -> Any:
        is_sequence = isinstance(items, Sequence) and not isinstance(items, (str, bytes))
        if not (is_sequence or _is_array(items)):
            return items
        if isinstance(items, _Column) and len(items) != self.completed:
            self._check_values(items)
        is_cut = self._is_cut(len(items), f"a list of {len(items)} objects")
        if not is_cut:
            return items
        return _Column(items[: self.samples]) if isinstance(items, _Column) else items[: self.samples]

    def _check_values(self, values: _Column) -> None:
        """Raise ValueError if a rank's value may have one item per sample: rows, or items of a sized object."""
        per_rank = self.completed // self.num_ranks
        is_of_ranks = isinstance(values, _PerRank)
        for value in values:
            has_rows = (isinstance(value, torch.Tensor) and value.ndim > 0) or _is_array(value)
            is_text = isinstance(value, (str, bytes))
            is_sized = has_rows or (is_of_ranks and isinstance(value, Sized) and not is_text)
            if is_sized and len(value) == per_rank > 1:
                raise self._unclear(f"{formatting.kind(value)} of length {per_rank}")

    def _is_cut(self, length: int, what: str) -> bool:
        """Return whether an item with ``length`` rows has one row per sample; raise ValueError if this is unclear."""
        if length == self.completed or not self.completed:
            return True
        if self.is_short or length == self.num_ranks:
            return False
        raise self._unclear(what)

    def _unclear(self, what: str) -> ValueError:
        added = f"was padded to {self.completed}" if not self.is_short else "is not full"
        return ValueError(
            f"gather_for_metrics does not know which rows of {what} belong to which sample: the last batch of all "
            f"ranks has {self.samples} samples and {added}. It can drop added samples from tensors with one row per "
            "sample, including tensors in tuples and dicts, and from lists with one item per sample (for a list of "
            "tensors or of dicts of tensors, set use_gather_object=True). Pass one of these, or use "
            "accelerator.gather, which drops nothing, and drop the rows of the added samples yourself"
        )


def _kind(part: Any) -> Any:
    """Return a key that is equal for parts with the same structure and the same kinds of rows."""
    if isinstance(part, torch.Tensor):
        return part.dtype, tuple(part.shape[1:])
    parts = nested.children(part)
    names = tuple(part) if isinstance(part, Mapping) else None
    return type(part), names, None if parts is None else tuple(map(_kind, parts))


def _tail_of(accumulation: AccumulationState, num_ranks: int) -> _Tail | None:
    """Return the last batch if the loop has reached it and rows must be dropped; None otherwise."""
    loader = accumulation.loaders.innermost
    if loader is None or not loader.end_of_dataloader:
        return None
    samples = accumulation.remainder
    # A shard may have filled the last batch with additional samples.
    if samples < 0 and loader.shard is not None and not _drops_last(loader):
        warn(
            "it is unknown how many samples were added to fill the loader's last batch, so the gathered "
            "values still include them. Use a batch_size and num_workers=0 to drop them."
        )
    is_whole = samples == loader.completed_rows
    if samples <= 0 or is_whole or (loader.adds_nothing and num_ranks > 1):
        return None
    return _Tail(samples, loader.completed_rows, num_ranks, loader.adds_nothing)


def _drops_last(loader: Any) -> bool:
    batch_sampler = getattr(loader, "batch_sampler", None)  # a user's own loader may have neither
    return bool(getattr(loader, "drop_last", False) or getattr(batch_sampler, "drop_last", False))
