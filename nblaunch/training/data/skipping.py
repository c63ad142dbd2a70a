"""Loaders that begin further on, for an epoch that was interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from nblaunch.training.data.loader import PreparedLoader
from nblaunch.training.data.samplers import SkipBatchSampler
from nblaunch.training.data.taken_over import batch_sampler_of, reading_options, sampling_options


class SkipDataLoader(DataLoader):
    """A plain data loader without its first batches, once: they are read and dropped.

    Args:
        dataset: as for :class:`torch.utils.data.DataLoader`, with its ``options``.
        skip_batches: how many.
    """

    def __init__(self, dataset: Any, skip_batches: int = 0, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        skipped, self.skip_batches = self.skip_batches, 0
        return islice(super().__iter__(), skipped, None)

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)


def skip_first_batches(dataloader: DataLoader, num_batches: int = 0) -> DataLoader:
    """A loader that goes on behind the first batches of ``dataloader``, for an epoch that was interrupted.

    Args:
        dataloader: prepared or not; it keeps its place, and later epochs may be read from either.
        num_batches: how many are left out of the first epoch that the new loader reads, counted as this rank gets
            them. Over indexed datasets nothing is loaded for them; streams are read and dropped.

    Raises:
        ValueError: ``num_batches`` is negative.
    """
    if num_batches < 0:
        raise ValueError(f"num_batches={num_batches} is negative")
    options = reading_options(dataloader)
    per_batch = 1
    if isinstance(dataloader, PreparedLoader):
        options.update(
            device=dataloader.device,
            config=dataloader.config,
            num_processes=dataloader.num_processes,
            rng_types=dataloader.rng_types,
            shard=dataloader.shard,
            slice_fn=dataloader.slice_fn,
            skip_batches=num_batches,
        )
        per_batch = dataloader.batches_per_round
    if isinstance(dataloader.dataset, IterableDataset):
        options.update(
            batch_size=dataloader.batch_size, drop_last=dataloader.drop_last, skip_batches=num_batches
        )
        kind: Any = type(dataloader) if isinstance(dataloader, PreparedLoader) else SkipDataLoader
    else:
        batch_sampler, is_passed_as_sampler = batch_sampler_of(dataloader)
        options.update(
            sampling_options(SkipBatchSampler(batch_sampler, num_batches * per_batch), is_passed_as_sampler)
        )
        kind = type(dataloader) if isinstance(dataloader, PreparedLoader) else DataLoader
    skipping: DataLoader = kind(dataloader.dataset, **options)
    if isinstance(skipping, PreparedLoader):
        skipping.follow(dataloader)
    return skipping
