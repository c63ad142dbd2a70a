"""The samplers nested in a loader, from its index sampler to the sampler of single indices; two samplers of our own.

Ranks share an order, because ``prepare.py`` gives the user's sampler a generator, and ``loader.py`` sets it to rank 0's
state at the start of each epoch. Only ``use_seedable_sampler`` puts a :class:`SeedableRandomSampler` in its place.

The index sampler is the outermost, as torch's ``DataLoader._index_sampler``: the batch sampler, where there is one.

DataLoader ── BatchSamplerShard ── BatchSampler ── RandomSampler          nested samplers, outermost first
                  (ours)           (innermost)     (sampler of single indices)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler


class SeedableRandomSampler(RandomSampler):
    """A random permutation that depends only on seed and epoch: equal on all ranks in any global random state.

    A complete iteration ends the epoch; the next one has another order. ``initial_seed`` is the seed of epoch 0; epoch
    ``e`` uses ``initial_seed + e``.

    Args:
        data_source, replacement, num_samples, generator: as for :class:`torch.utils.data.RandomSampler`.
        data_seed: the seed; None: what torch was last seeded with.
    """

    def __init__(
        self,
        data_source: Any,
        replacement: bool = False,
        num_samples: int | None = None,
        generator: torch.Generator | None = None,
        *,
        data_seed: int | None = None,
    ) -> None:
        super().__init__(data_source, replacement, num_samples, generator or torch.Generator())
        self.data_seed = data_seed
        self.initial_seed = torch.initial_seed() if data_seed is None else data_seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Give the next iteration the order of ``epoch``."""
        self.epoch = epoch

    def begin_epoch(self) -> None:
        """Begin the order of the epoch: the generator draws it next."""
        self.generator.manual_seed((self.initial_seed + self.epoch) % 2**63)

    def end_epoch(self) -> None:
        """Go on to the next epoch, once the order was read to its end."""
        self.set_epoch(self.epoch + 1)

    def __iter__(self) -> Iterator[int]:
        self.begin_epoch()
        yield from super().__iter__()
        self.end_epoch()


class SkipBatchSampler(BatchSampler):
    """A batch sampler without its first batches, once: later iterations are whole.

    Args:
        batch_sampler: kept as ``.batch_sampler``.
        skip_batches: how many.
        num_kept: how many of these, the first ones, are kept as ``kept`` while the rest is read.
    """

    def __init__(self, batch_sampler: Any, skip_batches: int = 0, num_kept: int = 0) -> None:
        self.batch_sampler = batch_sampler
        self.skip_batches = skip_batches
        self.num_kept = num_kept
        self.kept: list[list[int]] = []
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = bool(getattr(batch_sampler, "drop_last", False))

    @property
    def sampler(self) -> Any:
        """The sampler below the batch sampler; None if it has none."""
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
        # A generator, which skips once it is read: a DataLoader with worker processes makes two, and drops the first.
        skipped, self.skip_batches = self.skip_batches, 0
        batches = iter(self.batch_sampler)
        self.kept = list(islice(batches, min(skipped, self.num_kept)))
        yield from islice(batches, skipped - len(self.kept), None)


def index_sampler_of(loader: DataLoader) -> Any:
    """Return what ``DataLoader._index_sampler`` is: the batch sampler, or the sampler where there is none."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def nested_samplers(index_sampler: Any) -> list[Any]:
    """Return ``index_sampler`` and all that it is made of, outermost first."""
    samplers: list[Any] = []
    while index_sampler is not None and not any(index_sampler is sampler for sampler in samplers):
        samplers.append(index_sampler)
        below = getattr(index_sampler, "batch_sampler", None)
        index_sampler = getattr(index_sampler, "sampler", None) if below is None else below
    return samplers


def pass_epoch(index_sampler: Any, epoch: int) -> None:
    """Call ``set_epoch`` of every one in ``index_sampler`` that has it."""
    for sampler in nested_samplers(index_sampler):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def innermost(batch_sampler: Any) -> Any:
    """Return the user's batch sampler, below any number of ours; if it wraps another one, the inner one."""
    while True:
        below = getattr(batch_sampler, "batch_sampler", None)
        if below is None:
            below = getattr(batch_sampler, "sampler", None)
            if not isinstance(below, BatchSampler):
                return batch_sampler
        batch_sampler = below


def sampler_of(batch_sampler: Any) -> Any:
    """Return the sampler of single indices below any number of batch samplers; None if there is none."""
    return getattr(innermost(batch_sampler), "sampler", None)
