"""Samplers of the order that all ranks share: the same on each of them, or begun further on; and how to find them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler


class SeedableRandomSampler(RandomSampler):
    """A random permutation that depends on seed and epoch alone: equal on all ranks, whatever the global random state.

    Args:
        data_source: the dataset, as for :class:`torch.utils.data.RandomSampler`, with its ``options``.
        seed: the seed of epoch 0; epoch ``e`` uses ``seed + e``.
    """

    def __init__(self, data_source: Any, seed: int, **options: Any) -> None:
        super().__init__(data_source, **options)
        self.seed = seed
        self.epoch = 0
        self.generator = torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose order the next iteration has."""
        self.epoch = epoch

    def seed_epoch(self) -> None:
        """Begin the order of the epoch."""
        self.generator.manual_seed(self.seed + self.epoch)

    def __iter__(self) -> Iterator[int]:
        self.seed_epoch()
        return super().__iter__()


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches, once: later iterations are whole.

    Args:
        batch_sampler: kept as ``.batch_sampler``.
        skip_batches: how many.
    """

    def __init__(self, batch_sampler: Any, skip_batches: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))

    @property
    def sampler(self) -> Any:
        """The sampler below the batch sampler; None where it has none."""
        return sampler_of(self.batch_sampler)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    @property
    def total_length(self) -> int:
        """Batches with those that are skipped."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)

    def __iter__(self) -> Iterator[list[int]]:
        skipped, self.skip_batches = self.skip_batches, 0
        return islice(iter(self.batch_sampler), skipped, None)

    def set_epoch(self, epoch: int) -> None:
        """Hand the epoch to the batch sampler, where it wants it."""
        if hasattr(self.batch_sampler, "set_epoch"):
            self.batch_sampler.set_epoch(epoch)


def sampler_of(batch_sampler: Any) -> Any:
    """The sampler of single indices below any number of batch samplers; None where there is none."""
    return getattr(innermost(batch_sampler), "sampler", None)


def innermost(batch_sampler: Any) -> Any:
    """The batch sampler of the person, below any number of ours."""
    while hasattr(batch_sampler, "batch_sampler"):
        batch_sampler = batch_sampler.batch_sampler
    return batch_sampler
