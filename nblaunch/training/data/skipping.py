"""Loaders that begin further on in their next epoch: without the first batches, or behind what was seen before."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from nblaunch.training.data.adapter import (
    DataLoaderAdapter,
    DataLoaderStateMixin,
    index_sampler_options,
    inherited_options,
    is_stateful,
    stateful_loader,
)
from nblaunch.training.data.loader import PreparedLoader
from nblaunch.training.data.samplers import SkipBatchSampler, index_sampler_of


class SkipDataLoader(DataLoaderAdapter, DataLoaderStateMixin):
    """A plain data loader without its first batches, once: they are read and dropped.

    Args:
        dataset: as for :class:`torch.utils.data.DataLoader`, with its ``options``.
        skip_batches: how many.
        use_stateful_dataloader: read with torchdata.
    """

    def __init__(
        self, dataset: Any, skip_batches: int = 0, use_stateful_dataloader: bool = False, **options: Any
    ) -> None:
        super().__init__(dataset, use_stateful_dataloader, **options)
        self.skip_batches = skip_batches

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        skipped, self.skip_batches = self.skip_batches, 0
        self.begin()
        try:
            for batch in islice(iter(self.base_dataloader), skipped, None):
                self._note_position()
                yield batch
            self._note_position(is_end=True)
        finally:
            self.end()

    def __len__(self) -> int:
        return max(0, super().__len__() - self.skip_batches)


def skip_first_batches(dataloader: DataLoader, num_batches: int | None = None) -> DataLoader:
    """Return a loader that goes on behind the first batches of ``dataloader``, for an epoch that was interrupted.

    Args:
        dataloader: prepared or not; it keeps its place, and later epochs may be read from either.
        num_batches: how many are left out of the first epoch that the new loader reads, counted as this rank gets
            them. None: what all ranks, as many as there were, had seen at the checkpoint that was loaded last; none
            where that was not in the middle of an epoch. Over indexed datasets nothing is loaded for them; streams are
            read and dropped.

    Raises:
        ValueError: ``num_batches`` is negative.
    """
    if num_batches is None:
        if isinstance(dataloader, PreparedLoader) and dataloader.saved_position is not None:
            return dataloader.beginning_at(dataloader.saved_position)
        num_batches = 0
    if num_batches < 0:
        raise ValueError(f"num_batches={num_batches} is negative")
    options = inherited_options(dataloader)
    kind: Any = type(dataloader)
    per_batch = 1
    if isinstance(dataloader, PreparedLoader):
        options.update(dataloader.own_options(), skip_batches=num_batches)
        per_batch = dataloader.batches_per_round
    if isinstance(dataloader.dataset, IterableDataset):
        if not isinstance(dataloader, PreparedLoader):
            kind = SkipDataLoader
            options.update(use_stateful_dataloader=is_stateful(dataloader))
        options.update(
            batch_size=dataloader.batch_size, drop_last=dataloader.drop_last, skip_batches=num_batches
        )
    else:
        if not isinstance(dataloader, PreparedLoader):
            kind = stateful_loader if is_stateful(dataloader) else DataLoader
        index_sampler = SkipBatchSampler(index_sampler_of(dataloader), num_batches * per_batch)
        options.update(index_sampler_options(dataloader, index_sampler))
    skipping: DataLoader = kind(dataloader.dataset, **options)
    if isinstance(skipping, PreparedLoader):
        skipping.follow(dataloader)
    return skipping
