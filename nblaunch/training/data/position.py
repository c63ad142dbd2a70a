"""How far an epoch was read, counted so that any number of ranks can go on there, and the order of what is left.

2 ranks, batches of 3     0 1 2 │ 3 4 5 │ 6 7 8 │ 9 10 11 ──> saved      12 samples of the order were seen
3 ranks, batches of 2                                        12 13 │ 14 15 │ 16 17 │ ...
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, IterableDataset, Sampler

from nblaunch.training.data.samplers import SkipBatchSampler
from nblaunch.training.data.sharding import BatchSamplerShard, IterableDatasetShard


@dataclass(frozen=True)
class EpochPosition:
    """What all ranks together have read of an epoch.

    Args:
        samples: rows of the order, where batches are cut from one: they may have another size when it goes on.
        batches: of the loader as the user made it, for all other orders; items of a stream without batches.
    """

    samples: int = 0
    batches: int = 0


def rest_of_index_sampler(index_sampler: Any, position: EpochPosition) -> Any:
    """Return ``index_sampler``, or a rank's share of one, without what was read; once."""
    if isinstance(index_sampler, BatchSamplerShard):
        shard = copy.copy(index_sampler)
        shard.batch_sampler = rest_of_index_sampler(index_sampler.batch_sampler, position)
        return shard
    if type(index_sampler) is BatchSampler:
        rest = _SkippingSampler(index_sampler.sampler, position.samples)
        return BatchSampler(rest, index_sampler.batch_size, index_sampler.drop_last)
    return SkipBatchSampler(index_sampler, position.batches)


def rest_of_stream(dataset: Any, has_batches: bool, position: EpochPosition) -> Any:
    """Return ``dataset``, a stream or a rank's share of one, without what was read; once."""
    if isinstance(dataset, IterableDatasetShard):
        shard = copy.copy(dataset)
        shard.dataset = rest_of_stream(dataset.dataset, has_batches, position)
        return shard
    return _SkippingStream(dataset, position.samples if has_batches else position.batches)


class _SkippingSampler(Sampler[Any]):
    """A sampler without its first indices, once: later iterations are whole."""

    def __init__(self, sampler: Any, num_skipped: int) -> None:
        self.sampler = sampler
        self.num_skipped = num_skipped

    def __len__(self) -> int:
        return max(0, len(self.sampler) - self.num_skipped)

    def __iter__(self) -> Iterator[Any]:
        skipped, self.num_skipped = self.num_skipped, 0
        return islice(iter(self.sampler), skipped, None)


class _SkippingStream(IterableDataset):
    """A stream without its first items, once; it has the attributes of the stream."""

    def __init__(self, dataset: Any, num_skipped: int) -> None:
        self.dataset = dataset
        self.num_skipped = num_skipped

    def __len__(self) -> int:
        return max(0, len(self.dataset) - self.num_skipped)

    def __iter__(self) -> Iterator[Any]:
        skipped, self.num_skipped = self.num_skipped, 0
        return islice(iter(self.dataset), skipped, None)

    def __getattr__(self, name: str) -> Any:
        if name == "dataset" or name.startswith("__"):  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)
