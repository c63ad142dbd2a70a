"""Options of a DataLoader that a loader made from it inherits: they set how data is read, not which."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch.utils.data import DataLoader

_ACCEPTED = set(inspect.signature(DataLoader.__init__).parameters)
# Not every torch has all of them.
_INHERITED = (
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


def inherited_options(loader: DataLoader) -> dict[str, Any]:
    """Return the options of ``loader`` for a loader made from it: workers, collation, memory."""
    options = {
        name: getattr(loader, name) for name in _INHERITED if name in _ACCEPTED and hasattr(loader, name)
    }
    if is_stateful(loader):
        options["snapshot_every_n_steps"] = loader.snapshot_every_n_steps  # type: ignore[attr-defined]
    if not options["num_workers"]:
        # torch refuses these two without worker processes of the DataLoader, even at their defaults.
        options.pop("prefetch_factor", None)
        options.pop("multiprocessing_context", None)
    return options


def order_options(loader: DataLoader, order: Any) -> dict[str, Any]:
    """Return the options by which a loader made from ``loader`` reads in ``order``."""
    if loader.batch_sampler is None:  # the dataset gets whatever the sampler yields: an index, or a list
        return {"sampler": order, "batch_size": None}
    return {"batch_sampler": order}


def is_stateful(loader: DataLoader) -> bool:
    """Return whether ``loader`` is torchdata's ``StatefulDataLoader``."""
    torchdata = sys.modules.get(
        "torchdata.stateful_dataloader"
    )  # where it was not imported, nothing can be one
    return torchdata is not None and isinstance(loader, torchdata.StatefulDataLoader)
