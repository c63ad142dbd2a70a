"""Data loaders whose worker processes the kernel started. These processes answer only the kernel.

A loader with ``persistent_workers`` keeps its iterator and processes; a rank creates its own. An iterator that a cell
has begun raises an error, because a rank can't know what the iterator's processes have already sent to the kernel.
Iterators without processes continue in each rank from the kernel's position.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from nblaunch import packages
from nblaunch.worker.inheritance import pools

_ITERATORS = (
    ("torch.utils.data.dataloader", "DataLoader", "_MultiProcessingDataLoaderIter"),
    (
        "torchdata.stateful_dataloader.stateful_dataloader",
        "StatefulDataLoader",
        "_StatefulMultiProcessingDataLoaderIter",
    ),
)
"""Module, loader class, class of iterators with processes."""

_kept: list[Any] = []
"""The kernel's iterators, kept because freeing an iterator ends its processes."""


_watched: set[str] = set()
"""Modules whose loaders are watched in this process."""


def renew_at_use() -> None:
    """Restart inherited loaders on first use, and reject iterators with the kernel's processes.

    A process that this one forks inherits loaders again and must also call this function.
    """
    if not pools.has_made_processes():
        return
    for name, loader, iterator in _ITERATORS:
        module = sys.modules.get(name)
        if module is not None and name not in _watched and hasattr(module, iterator):
            _watched.add(name)
            cls = getattr(module, iterator)
            packages.call_before(getattr(module, loader), "__iter__", _forget_iterator)
            packages.call_before(cls, "_next_data", _reject_read)
            _leave_processes(cls)


def _is_kernels(iterator: Any) -> bool:
    processes: Any = getattr(iterator, "_workers", None)
    return bool(processes) and processes[0]._parent_pid != os.getpid()


def _forget_iterator(loader: Any) -> None:
    """Let a loader begin a new iterator if it keeps the kernel's."""
    iterator = vars(loader).get("_iterator")
    if _is_kernels(iterator):
        _kept.append(iterator)
        loader._iterator = None


def _reject_read(iterator: Any) -> None:
    if _is_kernels(iterator) and not iterator._shutdown:
        raise RuntimeError(
            "this iterator of a DataLoader was created in another process, and its worker processes serve only that "
            "process. Call iter(loader) inside the function to read the loader from its beginning"
        )


def _leave_processes(cls: Any) -> None:
    """Let iterators that are freed here leave the kernel's processes running."""
    end = cls._shutdown_workers

    @packages.replacement_of(end)
    def end_here(self: Any) -> None:
        if not _is_kernels(self):  # the kernel's processes share an event and would end
            end(self)

    cls._shutdown_workers = end_here
