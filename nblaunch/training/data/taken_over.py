"""What a new loader takes over from a person's: how it reads, and its batch sampler."""

from __future__ import annotations

import inspect
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

_ACCEPTED = set(inspect.signature(DataLoader.__init__).parameters)
# What says how data is read, not which: taken over from the person's loader. Not every torch has all of them.
_READING_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
)


def reading_options(loader: DataLoader) -> dict[str, Any]:
    """What says how ``loader`` reads, and not what: workers, collation, memory."""
    options = {
        name: getattr(loader, name)
        for name in _READING_OPTIONS
        if name in _ACCEPTED and hasattr(loader, name)
    }
    if not options["num_workers"]:
        # torch refuses these two without reading workers, even at their defaults.
        options.pop("prefetch_factor", None)
        options.pop("multiprocessing_context", None)
    return options


def batch_sampler_of(loader: DataLoader) -> tuple[Any, bool]:
    """The loader's batch sampler, and whether it was given as ``sampler`` with ``batch_size=None``.

    Raises:
        ValueError: it has none.
    """
    if loader.batch_sampler is not None:
        return loader.batch_sampler, False
    if isinstance(loader.sampler, BatchSampler):
        return loader.sampler, True
    raise ValueError(
        "a DataLoader over an indexed dataset with batch_size=None and no batch sampler hands out single samples, "
        "which can't be shared in batches. Give it a batch_size, or pass sampler=BatchSampler(...)."
    )


def sampling_options(batch_sampler: Any, is_passed_as_sampler: bool) -> dict[str, Any]:
    """What a new loader is given to read by ``batch_sampler``, as :func:`batch_sampler_of` has found it."""
    if is_passed_as_sampler:
        return {"sampler": batch_sampler, "batch_size": None}
    return {"batch_sampler": batch_sampler}
