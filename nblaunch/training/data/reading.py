"""How a loader reads, apart from what: the options that a loader made of another one takes over."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch.utils.data import DataLoader

_ACCEPTED = set(inspect.signature(DataLoader.__init__).parameters)
# What says how data is read, not which: taken over from the user's loader. Not every torch has all of them.
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
    """Return what says how ``loader`` reads, and not what: workers, collation, memory."""
    options = {
        name: getattr(loader, name)
        for name in _READING_OPTIONS
        if name in _ACCEPTED and hasattr(loader, name)
    }
    if is_stateful(loader):
        options["snapshot_every_n_steps"] = loader.snapshot_every_n_steps  # type: ignore[attr-defined]
    if not options["num_workers"]:
        # torch refuses these two without worker processes of the DataLoader, even at their defaults.
        options.pop("prefetch_factor", None)
        options.pop("multiprocessing_context", None)
    return options


def reading_order(loader: DataLoader, order: Any) -> dict[str, Any]:
    """Return what a new loader is given to read by ``order`` as ``loader`` reads by its own."""
    if loader.batch_sampler is None:  # the dataset gets whatever the sampler yields: an index, or a list
        return {"sampler": order, "batch_size": None}
    return {"batch_sampler": order}


def is_stateful(loader: DataLoader) -> bool:
    """Return whether torchdata reads it."""
    torchdata = sys.modules.get(
        "torchdata.stateful_dataloader"
    )  # where it was not imported, nothing can be one
    return torchdata is not None and isinstance(loader, torchdata.StatefulDataLoader)
