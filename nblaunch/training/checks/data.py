"""Checks for loaders that were not prepared: ranks read the same samples, or every epoch has the same order."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from nblaunch.progress import batches
from nblaunch.progress.plain_loops import plain_loops
from nblaunch.training.checks.check import Check, Prepared, Report

_NUM_COMPARED = 3  # batches in a row
_NUM_EPOCHS = 3


def _unprepared_iterator(prepared: Prepared) -> Any:
    """Return the torch loader's iterator that was read most recently; None inside a prepared loader's loop."""
    return plain_loops().last_iterator if prepared.accumulation.active_loader is None else None


def _sampler_of(iterator: Any) -> Any:
    """Return the sampler that yields single indices; None if the loader does not use torch's ``BatchSampler``."""
    index_batches = getattr(iterator, "_index_sampler", None)
    return index_batches.sampler if type(index_batches) is BatchSampler else None


class SameSamples(Check):
    """Each rank reads the same samples, in the same order as the other ranks.

    Loaders that look the same may read different data, for example a separate file or subset on each rank, so
    batches are compared. A loop may use only a part of each batch, so losses are compared as well.
    """

    name = "same_samples"

    def begin_window(self) -> None:
        self._digests: deque[int] = deque(maxlen=_NUM_COMPARED)
        self._losses: deque[str] = deque(maxlen=_NUM_COMPARED)

    def before_backward(self, prepared: Prepared, loss: torch.Tensor, options: Mapping[str, Any]) -> None:
        iterator = _unprepared_iterator(prepared)
        sampler = _sampler_of(iterator)
        if not isinstance(sampler, (SequentialSampler, RandomSampler, DistributedSampler)):
            return
        if prepared.shared.num_data_ranks == 1 or not prepared.models or len(sampler) < 2:
            return
        self._losses.append(f"{float(loss.detach()):.4g}")  # devices round differently
        if len(self._digests) == len(self._losses) == _NUM_COMPARED:
            self.report(
                f"each rank trains on the same {len(sampler):,} samples, in the same order",
                "Pass the DataLoader to accelerator.prepare(), which gives each rank its share",
                value=(type(sampler).__name__, len(sampler), *self._digests, *self._losses),
                judged_by="distinct",
            )
        _digest_next_batch(iterator, self._digests)


def _digest_next_batch(iterator: Any, digests: deque[int]) -> None:
    """Add to ``digests`` a digest of the next batch that a torch loader's iterator reads."""
    # Keep a weak reference, because the processes of the loader stop only when the iterator is gone.
    reference = weakref.ref(iterator)

    def read_and_digest() -> Any:
        living: Any = reference()
        living.__dict__.pop("_next_data", None)
        batch = living._next_data()
        with suppress(Exception):
            if (digest := batches.digest(batch)) is not None:
                digests.append(digest)
        return batch

    iterator._next_data = read_and_digest


@dataclass(eq=False)
class _Epochs:
    """Counts consecutive loops over a sampler in one epoch, except loops that were cut short, as in a trial run.

    Args:
        epoch: the epoch of the sampler.
        count: number of loops.
        last: iterator of the last loop.
        is_cut_short: whether the last loop ended before the last batch.
    """

    epoch: int = -1
    count: int = 0
    last: weakref.ref[Any] | None = None
    is_cut_short: bool = False

    def add(self, iterator: Any, sampler: Any) -> int:
        """Add a step of a loop, and return the number of loops."""
        if self.last is None or self.last() is not iterator:
            self.count = self.count + (not self.is_cut_short) if self.epoch == sampler.epoch else 1
            self.epoch, self.last = sampler.epoch, weakref.ref(iterator)
        self.is_cut_short = iterator._num_yielded < len(iterator._index_sampler)
        return self.count


class FixedOrder(Check):
    """A ``DistributedSampler`` stays in one epoch, so every epoch has the same order."""

    name = "epoch_not_set"

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self._seen: weakref.WeakKeyDictionary[Any, _Epochs] = weakref.WeakKeyDictionary()

    def begin_window(self) -> None:
        for seen in self._seen.values():
            seen.is_cut_short = False  # the rest of its loop was not examined

    def before_backward(self, prepared: Prepared, loss: torch.Tensor, options: Mapping[str, Any]) -> None:
        iterator = _unprepared_iterator(prepared)
        sampler = _sampler_of(iterator)
        if not isinstance(sampler, DistributedSampler) or not sampler.shuffle:
            return
        seen = self._seen.setdefault(sampler, _Epochs())
        if seen.add(iterator, sampler) == _NUM_EPOCHS:
            self.report(
                f"{_NUM_EPOCHS} epochs in a row read the samples in the same order, because DistributedSampler stays "
                f"in epoch {sampler.epoch}",
                "Call sampler.set_epoch(epoch) before each epoch, or pass the DataLoader to accelerator.prepare()",
            )
