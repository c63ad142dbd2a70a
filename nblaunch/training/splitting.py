"""Which part of a collection belongs to which rank: consecutive shares, as even as can be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def split_evenly(inputs: Any, rank: int, world_size: int, apply_padding: bool) -> Any:
    """Rank's share of ``inputs``; see ``ProcessControl.split_between_processes``."""
    if world_size == 1:
        return inputs
    if isinstance(inputs, Mapping):
        lengths = {key: len(value) for key, value in inputs.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the values of a dict that is split must be equally long, got {lengths}")
        return {key: split_evenly(value, rank, world_size, apply_padding) for key, value in inputs.items()}
    indices = share_of(len(inputs), rank, world_size, apply_padding)
    if hasattr(inputs, "select") and not isinstance(inputs, torch.Tensor):
        return inputs.select(indices)
    if isinstance(inputs, torch.Tensor):
        return inputs[torch.tensor(indices, dtype=torch.long, device=inputs.device)]
    if isinstance(inputs, (list, tuple)):
        return type(inputs)([inputs[index] for index in indices])
    raise TypeError(
        f"split_between_processes can't split a {type(inputs).__name__}; valid are list, tuple, tensor, a dict "
        "of these, and objects with `select` such as datasets.Dataset"
    )


def share_of(length: int, rank: int, world_size: int, apply_padding: bool = False) -> list[int]:
    """Indices of rank's consecutive share of ``range(length)``; padded by repeating the last index."""
    size, extra = divmod(length, world_size)
    start = rank * size + min(rank, extra)
    indices = list(range(start, start + size + (1 if rank < extra else 0)))
    if apply_padding and length and extra:
        indices += [indices[-1] if indices else length - 1] * (size + 1 - len(indices))
    return indices
