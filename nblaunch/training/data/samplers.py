"""The samplers nested in a loader, from the index sampler to the sampler of single indices, including nblaunch's own.

Ranks share an order because ``prepare.py`` gives the user's sampler a generator, and ``loader.py`` sets it to rank 0's
state at the start of each epoch. Only ``use_seedable_sampler`` replaces the sampler with a
:class:`SeedableRandomSampler`.

The index sampler is the outermost one, as in torch's ``DataLoader._index_sampler``: the batch sampler, if there is one.

DataLoader ── BatchSamplerShard ── BatchSampler ── RandomSampler          nested samplers, outermost first
                  (ours)           (innermost)     (sampler of single indices)
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler


class SeedableRandomSampler(RandomSampler):
    """A random permutation that depends only on the seed and the epoch, so all ranks draw the same one.

    A complete iteration ends the epoch; the next one has a different order. ``initial_seed`` is the seed of epoch 0;
    epoch ``e`` uses ``initial_seed + e``.

    Args:
        data_source, replacement, num_samples, generator: as for :class:`torch.utils.data.RandomSampler`.
        data_seed: the seed; None: ``torch.initial_seed()``.
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
        """Make the next iteration use the order of ``epoch``."""
        self.epoch = epoch

    def begin_epoch(self) -> None:
        """Seed the generator for the epoch. The generator then draws the epoch's order."""
        self.generator.manual_seed((self.initial_seed + self.epoch) % 2**63)

    def end_epoch(self) -> None:
        """Advance to the next epoch. Call it once the order has been read to its end."""
        self.set_epoch(self.epoch + 1)

    def __iter__(self) -> Iterator[int]:
        self.begin_epoch()
        yield from super().__iter__()
        self.end_epoch()


class SkipBatchSampler(BatchSampler):
    """A batch sampler that skips its first batches in the first iteration.

    Args:
        batch_sampler: the wrapped sampler, kept as ``.batch_sampler``.
        skip_batches: number of batches to skip.
        num_kept: number of skipped batches to keep in ``kept``, counted from the first. If ``batch_sampler`` itself has
            skipped and kept batches, its batches are kept instead, because they come first in the epoch.
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
        """The sampler nested in the batch sampler; None if there is none."""
        return sampler_of(self.batch_sampler)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler

    @property
    def total_length(self) -> int:
        """Number of batches, including skipped ones."""
        return len(self.batch_sampler)

    def __len__(self) -> int:
        return max(0, len(self.batch_sampler) - self.skip_batches)

    def __iter__(self) -> Iterator[list[int]]:
        # Skip only when the iterator is read: a DataLoader with worker processes creates two iterators and drops the
        # first.
        skipped, self.skip_batches = self.skip_batches, 0
        batches = iter(self.batch_sampler)
        first = list(islice(batches, min(skipped, self.num_kept)))
        self.kept = getattr(self.batch_sampler, "kept", None) or first
        yield from islice(batches, skipped - len(first), None)


def index_sampler_of(loader: DataLoader) -> Any:
    """Return the batch sampler, or the sampler if there is none, as ``DataLoader._index_sampler`` does."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def nested_samplers(index_sampler: Any) -> list[Any]:
    """Return ``index_sampler`` and the samplers nested in it, outermost first."""
    samplers: list[Any] = []
    while index_sampler is not None and not any(index_sampler is sampler for sampler in samplers):
        samplers.append(index_sampler)
        below = getattr(index_sampler, "batch_sampler", None)
        index_sampler = getattr(index_sampler, "sampler", None) if below is None else below
    return samplers


def generators_of(index_sampler: Any, dataset: Any, extra: torch.Generator | None) -> list[torch.Generator]:
    """Return ``extra`` and the generators of nested samplers and a stream, without duplicates."""
    owners = [*nested_samplers(index_sampler), dataset if isinstance(dataset, IterableDataset) else None]
    generators = [extra, *(getattr(owner, "generator", None) for owner in owners)]
    unique = {id(generator): generator for generator in generators if isinstance(generator, torch.Generator)}
    return list(unique.values())


def draws_from_own_generators(index_sampler: Any, dataset: Any) -> bool:
    """Return whether only the samplers' generators decide the order.

    A stream or a user's sampler may use any generator.
    """
    packages = ("torch.", "torchdata.", "nblaunch.")
    is_known = all(type(part).__module__.startswith(packages) for part in nested_samplers(index_sampler))
    return is_known and not isinstance(dataset, IterableDataset)


def pass_epoch(index_sampler: Any, epoch: int) -> None:
    """Call ``set_epoch`` on ``index_sampler`` and on every nested sampler that has it."""
    for sampler in nested_samplers(index_sampler):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def innermost(batch_sampler: Any) -> Any:
    """Return the batch sampler at the bottom of any number of nested ones."""
    while True:
        below = getattr(batch_sampler, "batch_sampler", None)
        if below is None:
            below = getattr(batch_sampler, "sampler", None)
            if not isinstance(below, BatchSampler):
                return batch_sampler
        batch_sampler = below


def sampler_of(batch_sampler: Any) -> Any:
    """Return the sampler from which the innermost batch sampler gets its indices; None if there is none."""
    return getattr(innermost(batch_sampler), "sampler", None)
