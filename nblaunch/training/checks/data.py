"""Checks for loaders that were not prepared: ranks read the same samples, or every epoch has the same order."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler

from nblaunch.progress.plain_loops import plain_loops
from nblaunch.training.checks.check import Check, Prepared, Report

_NUM_EPOCHS = 3  # looking at a first batch, and a warm-up run, also count as epochs


def _unprepared_iterator(prepared: Prepared) -> Any:
    """Return the iterator of torch's loader that was read last; None inside a prepared loader's loop."""
    return plain_loops().last_iterator if prepared.accumulation.active_loader is None else None


def _sampler_of(iterator: Any) -> Any:
    """Return the sampler of single samples; None without torch's ``BatchSampler``."""
    batches = getattr(iterator, "_index_sampler", None)
    return batches.sampler if type(batches) is BatchSampler else None


class SameSamples(Check):
    """Each rank reads all samples of a dataset, in the same order as the other ranks."""

    name = "same_samples"

    def before_backward(self, prepared: Prepared, loss: torch.Tensor) -> None:
        iterator = _unprepared_iterator(prepared)
        sampler = _sampler_of(iterator)
        if type(sampler) not in (SequentialSampler, RandomSampler) or prepared.shared.num_data_ranks == 1:
            return
        if not prepared.models or len(sampler) < 2:
            return
        # A loader draws this number at the start of an epoch. If it is equal on all ranks, so is the order.
        seed = iterator._base_seed if isinstance(sampler, RandomSampler) else 0
        self.report(
            f"each rank trains on the same {len(sampler):,} samples, in the same order",
            "Pass the DataLoader to accelerator.prepare(), which gives each rank its share",
            value=(type(sampler).__name__, len(sampler), seed),
            judged_by="distinct",
        )


class FixedOrder(Check):
    """A ``DistributedSampler`` stays in one epoch, so every epoch has the same order."""

    name = "epoch_not_set"

    def __init__(self, report: Report) -> None:
        super().__init__(report)
        self._seen: weakref.WeakKeyDictionary[Any, tuple[int, int, weakref.ref[Any]]] = (
            weakref.WeakKeyDictionary()
        )

    def before_backward(self, prepared: Prepared, loss: torch.Tensor) -> None:
        iterator = _unprepared_iterator(prepared)
        sampler = _sampler_of(iterator)
        if not isinstance(sampler, DistributedSampler) or not sampler.shuffle:
            return
        epoch, count, last = self._seen.get(sampler, (sampler.epoch, 0, None))
        if last is None or last() is not iterator:
            count = count + 1 if epoch == sampler.epoch else 1
            self._seen[sampler] = sampler.epoch, count, weakref.ref(iterator)
        if count == _NUM_EPOCHS:
            self.report(
                f"{_NUM_EPOCHS} epochs in a row read the samples in the same order: DistributedSampler is in epoch "
                f"{epoch} in all of them",
                "Call sampler.set_epoch(epoch) before each epoch, or pass the DataLoader to accelerator.prepare()",
            )
