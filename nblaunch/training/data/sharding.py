"""A rank's share of a sampler or a stream, and the part of an epoch that has not been read.

Every rank computes the same global order and keeps its share, so ranks neither communicate nor wait for each other
here. ``loader.py`` moves the data and synchronises the order.

    batches of one epoch     b0 b1 │ b2 b3 │ b4 (short)          ── rounds of P = 2 batches
    rank 0                   b0      b2      b4 + first samples
    rank 1                   b1      b3      more first samples  ── ``even_batches`` completes the last round

An :class:`EpochPosition` counts the samples that were read, so any number of ranks can continue from it:

    2 ranks, batches of 3     0 1 2 │ 3 4 5 │ 6 7 8 │ 9 10 11 ──> saved      12 samples have been read
    3 ranks, batches of 2                                        12 13 │ 14 15 │ 16 17 │ ...
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from typing import Any

import torch
from torch.utils.data import BatchSampler, IterableDataset, RandomSampler

from nblaunch.progress.board_reports import length_of
from nblaunch.training.data.samplers import SeedableRandomSampler, SkipBatchSampler


class BatchSamplerShard(BatchSampler):
    """One rank's share of a batch sampler.

    Args:
        batch_sampler: yields the global order as lists of indices; kept as ``.batch_sampler``.
        num_processes: number of ranks.
        process_index: this rank.
        split_batches: False: batch ``i`` goes to rank ``i % num_processes``. True: every batch is cut into
            ``num_processes`` equal parts, one per rank.
        even_batches: pad the last round with indices from the start of the epoch, repeated if necessary, so
            that all ranks get the same number of batches of equal size. If the sampler has no ``batch_size``,
            add whole batches. False: some ranks may get one batch fewer, or a shorter batch.

    Once an epoch has been read to its end, ``tail_rows`` is the number of real rows in the last global batch; 0 if
    there is no padding. ``completed_rows`` is the number of rows in that batch, including padding.

    Raises:
        ValueError: ``split_batches`` is set, and the batch sampler has no ``batch_size``, or one that is not a multiple
            of ``num_processes``.
    """

    def __init__(
        self,
        batch_sampler: Iterable[list[int]],
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
        even_batches: bool = True,
    ) -> None:
        self.batch_sampler = batch_sampler
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.even_batches = even_batches
        self.batch_size: int | None = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last: bool = bool(getattr(batch_sampler, "drop_last", False))
        self.tail_rows = self.completed_rows = 0
        self._check()

    def _check(self) -> None:
        if not self.split_batches:
            return
        if self.batch_size is None:
            raise ValueError(
                "split_batches=True needs a batch sampler with a batch_size, but "
                f"{type(self.batch_sampler).__name__} has none. Give it a `batch_size` attribute, or use "
                "DataLoaderConfiguration(split_batches=False)."
            )
        check_divisible(self.batch_size, self.num_processes)

    @property
    def sampler(self) -> Any:
        """The sampler nested in the batch sampler; None if there is none."""
        return getattr(self.batch_sampler, "sampler", None)

    @sampler.setter
    def sampler(self, sampler: Any) -> None:
        self.batch_sampler.sampler = sampler  # type: ignore[attr-defined]

    @property
    def total_length(self) -> int:
        """Number of batches in the global order. Raises TypeError if the batch sampler has no length."""
        return len(self.batch_sampler)  # type: ignore[arg-type]

    def __len__(self) -> int:
        if self.split_batches:
            is_short = not (self.even_batches or self.drop_last) and self._has_no_part(self.process_index)
            return self.total_length - int(is_short)
        whole, rest = divmod(self.total_length, self.num_processes)
        if self.drop_last or rest == 0:
            return whole
        return whole + (1 if self.even_batches or self.process_index < rest else 0)

    @property
    def is_uneven(self) -> bool:
        """Whether some ranks get one batch fewer than others; True if this can't be known in advance."""
        if self.even_batches or self.drop_last:
            return False
        if self.split_batches:
            return self._has_no_part(self.num_processes - 1)
        try:
            return self.total_length % self.num_processes != 0
        except TypeError:  # the batch sampler has no length
            return self.num_processes > 1

    def _has_no_part(self, rank: int) -> bool:
        """Return whether the last batch is so short that ``rank`` gets nothing; False if this is unknown."""
        tail = max(0, length_of(self.sampler)) % (self._own_size * self.num_processes)
        return 0 < tail <= rank * self._own_size

    @property
    def _own_size(self) -> int:
        """Rows of a rank's full batch."""
        assert self.batch_size is not None
        return self.batch_size // self.num_processes if self.split_batches else self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        self.tail_rows = 0
        # A plain batch sampler divides a list of indices. Doing that here avoids creating other ranks'
        # batches.
        is_plain = (
            type(self.batch_sampler) is BatchSampler and self.batch_size == self.batch_sampler.batch_size
        )
        if is_plain and not self.split_batches:
            return chain.from_iterable(self._cut_flat(self.batch_sampler.sampler))  # type: ignore[attr-defined]
        return self._take_own(self._rounds())

    def _cut_flat(self, sampler: Any) -> Iterator[list[list[int]]]:
        """Yield lists of this rank's batches, with indices from ``sampler``. These are the same batches that
        :meth:`_take_own` yields.

        If the sampler draws a permutation, the first list holds the batches of all complete rounds.
        """
        size = self._own_size
        round_size = size * self.num_processes
        start = self.process_index * size
        order = _permutation(sampler)
        if order is None:
            indices, head = iter(sampler), None
            while len(rows := list(islice(indices, round_size))) == round_size:
                head = head or rows
                yield [rows[start : start + size]]
        else:
            end = len(order) - len(order) % round_size
            yield order[:end].view(-1, self.num_processes, size)[:, self.process_index].tolist()
            head, rows = order[:round_size].tolist(), order[end:].tolist()
        if order is not None:
            # When it is exhausted, torch's RandomSampler draws one more permutation, which it does not use.
            # Draw it here too, so that the next epoch has the same order as in a single process. Reading an
            # incomplete round exhausts the sampler. Draw before yielding that round, because the user's loop may stop
            # there.
            torch.randperm(len(order), generator=sampler.generator)
            if isinstance(sampler, SeedableRandomSampler):
                sampler.end_epoch()
        if rows and not self.drop_last:
            batches = [rows[first : first + size] for first in range(0, len(rows), size)]
            if self.even_batches:
                batches = self._complete(batches, head or rows)
            yield batches[self.process_index : self.process_index + 1]

    def _rounds(self) -> Iterator[list[list[int]]]:
        """Yield the batches of all ranks, round by round: each round has P batches, or P parts of one batch. The last
        round may have fewer.
        """
        batches, size = iter(self.batch_sampler), self.num_processes
        if not self.split_batches:
            while batch_round := list(islice(batches, size)):
                yield batch_round
            return
        starts = [rank * self._own_size for rank in range(size + 1)]
        for batch in map(list, batches):
            yield [batch[start:end] for start, end in pairwise(starts) if start < len(batch)]

    def _take_own(self, rounds: Iterator[list[list[int]]]) -> Iterator[list[int]]:
        """Yield this rank's batch of every round, after padding a round if ``even_batches`` is set."""
        first: list[list[int]] = []
        for batch_round in rounds:
            first = first or batch_round
            self.tail_rows = 0
            is_short = len(batch_round) < self.num_processes
            if self.split_batches and not is_short:
                is_short = len(batch_round[-1]) < self._own_size
            if self.drop_last and is_short:
                return
            if self.even_batches:
                batch_round = self._even(batch_round, first)
            if self.process_index < len(batch_round):
                yield batch_round[self.process_index]

    def _even(self, batch_round: list[list[int]], first: list[list[int]]) -> list[list[int]]:
        """Return a round with a batch for every rank, padded from the ``first`` round."""
        missing = self.num_processes - len(batch_round)
        if self.batch_size is None:  # batches may have any size, so only their number can be made equal
            completed = [*batch_round, *islice(_cycle(first), missing)]
            self.tail_rows = sum(map(len, batch_round)) if missing else 0
            self.completed_rows = sum(map(len, completed))
            return completed
        if not missing and all(len(batch) >= self._own_size for batch in batch_round):
            return batch_round
        return self._complete(batch_round, list(chain.from_iterable(first)))

    def _complete(self, batch_round: list[list[int]], head: list[int]) -> list[list[int]]:
        """Divide the rows of ``batch_round`` into equal batches; pad the end with repeated rows of ``head``.

        Real rows come first, in order, so the padding is everything after the first ``tail_rows`` rows.
        """
        rows = [index for batch in batch_round for index in batch]
        size = max(self._own_size, math.ceil(len(rows) / self.num_processes))
        self.completed_rows = size * self.num_processes
        self.tail_rows = len(rows) % self.completed_rows
        rows += islice(_cycle(head), self.completed_rows - len(rows))
        return [rows[start : start + size] for start in range(0, len(rows), size)]


class SampleShard(BatchSamplerShard):
    """One rank's share of a sampler of single indices, for loaders that yield single samples.

    Args:
        sampler: yields the global order, index by index.
        num_processes, process_index, even_batches: as in :class:`BatchSamplerShard`, for batches of one sample.

    ``tail_rows`` is -1 if samples were added, because the number of rows in a sample is unknown.
    """

    def __init__(
        self, sampler: Any, num_processes: int = 1, process_index: int = 0, even_batches: bool = True
    ) -> None:
        single = BatchSampler(sampler, 1, drop_last=False)
        super().__init__(single, num_processes, process_index, even_batches=even_batches)

    def __iter__(self) -> Iterator[Any]:
        yield from chain.from_iterable(super().__iter__())
        self.tail_rows = -1 if self.tail_rows else 0


class IterableDatasetShard(IterableDataset):
    """One rank's share of an iterable dataset: consecutive blocks of ``batch_size`` rows go to consecutive ranks.

    Every rank reads the whole stream and keeps its own blocks, so the stream must be the same on all ranks.

    Args:
        dataset: the stream; kept as ``.dataset``.
        batch_size: rows in each rank's block; with ``split_batches``, rows in the global batch. None: the stream
            yields whole batches, and each rank gets one per round.
        drop_last: drop an incomplete round instead of filling it up from the first round.
        num_processes: number of ranks.
        process_index: this rank.
        split_batches: ``batch_size`` is the size of the global batch.

    ``tail_rows`` is the same as in :class:`BatchSamplerShard`, but only the process that reads the stream knows it. It
    is -1 if whole batches were added, because their number of rows is unknown.

    Raises:
        ValueError: ``split_batches`` is set, and ``batch_size`` is not a multiple of ``num_processes``.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        drop_last: bool = False,
        num_processes: int = 1,
        process_index: int = 0,
        split_batches: bool = False,
    ) -> None:
        if split_batches:
            check_divisible(batch_size or 0, num_processes)
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_processes = num_processes
        self.process_index = process_index
        self.split_batches = split_batches
        self.tail_rows = 0

    @property
    def completed_rows(self) -> int:
        """Rows in the last global batch, including padding."""
        return self._block * self.num_processes

    @property
    def _block(self) -> int:
        size = self.batch_size or 1
        return size // self.num_processes if self.split_batches else size

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the dataset, if it has ``set_epoch``."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of this rank's rows; raise TypeError if the dataset has no length."""
        whole, rest = divmod(len(self.dataset), self._block * self.num_processes)
        return (whole + (1 if rest and not self.drop_last else 0)) * self._block

    def __iter__(self) -> Iterator[Any]:
        self.tail_rows = 0
        size = self._block * self.num_processes
        mine = slice(self.process_index * self._block, (self.process_index + 1) * self._block)
        head: list[Any] = []
        rows = iter(self.dataset)
        while batch := list(islice(rows, size)):
            head = head or batch
            if len(batch) < size:
                if self.drop_last:
                    return
                self.tail_rows = -1 if self.batch_size is None else len(batch)
                batch = [*batch, *islice(_cycle(head), size - len(batch))]
            yield from batch[mine]


def check_divisible(batch_size: int, num_processes: int) -> None:
    """Raise ValueError if ``split_batches`` can't divide a batch into equal parts."""
    if batch_size % num_processes:
        raise ValueError(
            f"split_batches=True cuts each batch into {num_processes} equal parts, but batch_size={batch_size} is not "
            f"a multiple of {num_processes}"
        )


def _permutation(sampler: Any) -> torch.Tensor | None:
    """Return the permutation of all indices that a sampler draws; None if it draws none.

    Given the permutation, a rank converts only its own indices to Python numbers. If samples are cheap to load, that
    conversion is most of the cost of dividing the data.
    """
    if isinstance(sampler, SeedableRandomSampler):
        sampler.begin_epoch()
    elif type(sampler) is not RandomSampler or sampler.generator is None:
        return None
    num_rows = len(sampler.data_source)
    if sampler.replacement or sampler.num_samples != num_rows:
        return None
    # Draw as torch's RandomSampler does, so that any number of processes gets the same order as a single process.
    return torch.randperm(num_rows, generator=sampler.generator)


def _cycle(items: list[Any]) -> Iterator[Any]:
    """Yield ``items`` repeatedly; yield nothing if there are none."""
    while items:
        yield from items


# --- the rest of an epoch ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EpochPosition:
    """The part of an epoch that all ranks together have read.

    Args:
        samples: number of rows, if torch forms the batches. The batch size may then change when the epoch
            continues.
        batches: otherwise, number of batches of the user's loader; for a stream without batches, number of
            items.
    """

    samples: int = 0
    batches: int = 0

    def __add__(self, other: EpochPosition) -> EpochPosition:
        return EpochPosition(self.samples + other.samples, self.batches + other.batches)


def rest_of_index_sampler(index_sampler: Any, position: EpochPosition) -> Any:
    """Return a sampler like ``index_sampler`` whose first epoch skips the samples read so far.

    ``index_sampler`` may be a rank's share.
    """
    if isinstance(index_sampler, BatchSamplerShard):
        shard = copy.copy(index_sampler)
        shard.batch_sampler = rest_of_index_sampler(index_sampler.batch_sampler, position)
        return shard
    if type(index_sampler) is BatchSampler:
        rest: Any = _WithoutFirst(index_sampler.sampler, position.samples)
        return BatchSampler(rest, index_sampler.batch_size, index_sampler.drop_last)
    return SkipBatchSampler(index_sampler, position.batches)


def rest_of_stream(dataset: Any, has_batches: bool, position: EpochPosition) -> Any:
    """Return a stream like ``dataset`` whose first epoch skips the samples read so far.

    ``dataset`` may be a rank's share.
    """
    if isinstance(dataset, IterableDatasetShard):
        shard = copy.copy(dataset)
        shard.dataset = rest_of_stream(dataset.dataset, has_batches, position)
        return shard
    return _WithoutFirst(dataset, position.samples if has_batches else position.batches)


class _WithoutFirst(IterableDataset):
    """A sampler or a stream that skips its first items in the first iteration; it has the attributes of its source."""

    def __init__(self, source: Any, num_skipped: int) -> None:
        self.source = source
        self.num_skipped = num_skipped

    def __len__(self) -> int:
        return max(0, len(self.source) - self.num_skipped)

    def __iter__(self) -> Iterator[Any]:
        skipped, self.num_skipped = self.num_skipped, 0
        return islice(iter(self.source), skipped, None)

    def __getattr__(self, name: str) -> Any:
        if name == "source" or name.startswith("__"):  # during unpickling
            raise AttributeError(name)
        return getattr(self.source, name)
