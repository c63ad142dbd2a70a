"""Distribution of samples over ranks: properties for all sizes."""

from __future__ import annotations

from collections import Counter, UserDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from nblaunch.training.data.samplers import SeedableRandomSampler, sampler_of
from nblaunch.training.data.sharding import BatchSamplerShard, IterableDatasetShard, SampleShard
from nblaunch.training.process_methods import share_of, split_evenly

LENGTHS = st.integers(0, 70)
BATCHES = st.integers(1, 9)
WORLDS = st.integers(1, 6)


def _shards(
    length: int, batch: int, world: int, drop_last: bool = False, **options: Any
) -> list[BatchSamplerShard]:
    return [
        BatchSamplerShard(
            BatchSampler(SequentialSampler(range(length)), batch, drop_last), world, rank, **options
        )
        for rank in range(world)
    ]


def _global_order(per_rank: list[list[list[int]]]) -> list[list[int]]:
    """Return global batches as ``gather`` would return them: the ranks' batches of each round, one after the other."""
    rounds = max(map(len, per_rank), default=0)
    return [[i for batches in per_rank if n < len(batches) for i in batches[n]] for n in range(rounds)]


@given(LENGTHS, BATCHES, WORLDS, st.booleans())
def test_even_batches_divide_all_samples_equally(length: int, batch: int, world: int, split: bool) -> None:
    size = batch * world if split else batch
    shards = _shards(length, size, world, split_batches=split)
    per_rank = [list(shard) for shard in shards]
    assert [len(shard) for shard in shards] == [len(batches) for batches in per_rank]
    assert len({len(batches) for batches in per_rank}) == 1
    assert {len(b) for batches in per_rank for b in batches} <= {batch}
    gathered = _global_order(per_rank)
    if gathered and shards[0].tail_rows:
        gathered[-1] = gathered[-1][: shards[0].tail_rows]
    assert [i for rows in gathered for i in rows] == list(range(length))
    assert len({shard.tail_rows for shard in shards}) == 1
    assert shards[0].tail_rows == length % (batch * world)


@given(LENGTHS, BATCHES, WORLDS, st.booleans())
def test_uneven_batches_add_nothing(length: int, batch: int, world: int, split: bool) -> None:
    size = batch * world if split else batch
    shards = _shards(length, size, world, split_batches=split, even_batches=False)
    per_rank = [list(shard) for shard in shards]
    assert [len(shard) for shard in shards] == [len(batches) for batches in per_rank]
    assert [i for rows in _global_order(per_rank) for i in rows] == list(range(length))
    lengths = [len(batches) for batches in per_rank]
    assert max(lengths) - min(lengths) <= 1
    assert {shard.is_uneven for shard in shards} == {max(lengths) > min(lengths)}
    assert all(shard.tail_rows == 0 for shard in shards)


@given(LENGTHS, BATCHES, WORLDS, st.booleans(), st.booleans())
def test_drop_last_drops_only_incomplete_rounds(
    length: int, batch: int, world: int, split: bool, even: bool
) -> None:
    size = batch * world if split else batch
    shards = _shards(length, size, world, drop_last=True, split_batches=split, even_batches=even)
    per_rank = [list(shard) for shard in shards]
    assert [len(shard) for shard in shards] == [len(batches) for batches in per_rank]
    kept = length - length % (batch * world)
    assert [i for rows in _global_order(per_rank) for i in rows] == list(range(kept))
    assert not any(shard.is_uneven for shard in shards)


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=7), max_size=12), WORLDS)
def test_batches_of_any_size_are_dealt_in_turn(batches: list[list[int]], world: int) -> None:
    shards = [BatchSamplerShard(batches, world, rank, even_batches=False) for rank in range(world)]
    per_rank = [list(shard) for shard in shards]
    assert [len(shard) for shard in shards] == [len(own) for own in per_rank]
    assert Counter(i for own in per_rank for b in own for i in b) == Counter(i for b in batches for i in b)
    assert {shard.is_uneven for shard in shards} == {len(set(map(len, per_rank))) > 1}


class _Irregular:
    """A batch sampler whose batches may be shorter than declared, even in the middle."""

    batch_size = 4

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


@given(st.lists(st.integers(1, 6), max_size=12), WORLDS)
def test_irregular_batches_are_evened_out_and_no_sample_is_lost(sizes: list[int], world: int) -> None:
    starts = [sum(sizes[:n]) for n in range(len(sizes))]
    batches = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=True)]
    per_rank = [list(BatchSamplerShard(_Irregular(batches), world, rank)) for rank in range(world)]
    assert len({len(own) for own in per_rank}) == 1
    assert {i for own in per_rank for b in own for i in b} == set(range(sum(sizes)))


def test_the_tail_is_completed_from_the_start_of_the_epoch() -> None:
    first, second = (list(shard) for shard in _shards(20, 3, 2))
    assert (first[-1], second[-1]) == ([18, 19, 0], [1, 2, 3])
    first, second = (list(shard) for shard in _shards(2, 3, 2))
    assert (first, second) == ([[0, 1, 0]], [[1, 0, 1]])


@pytest.mark.parametrize("batch", [16, 1000, 9000])
@pytest.mark.parametrize("shuffle", [False, True])
def test_long_epochs_have_the_order_of_one_process(batch: int, shuffle: bool) -> None:
    """Orders are processed in pieces of thousands of indices; the ranks' joint order must not show that in any
    epoch.
    """

    def order() -> BatchSampler:
        rows = range(60_001)
        generator = torch.Generator().manual_seed(7)
        return BatchSampler(
            RandomSampler(rows, generator=generator) if shuffle else SequentialSampler(rows), batch, False
        )

    alone, shards = order(), [BatchSamplerShard(order(), 3, rank, even_batches=False) for rank in range(3)]
    for _ in range(2):
        gathered = _global_order([list(shard) for shard in shards])
        assert [i for rows in gathered for i in rows] == [i for rows in alone for i in rows]


@pytest.mark.parametrize("length", [10, 11, 12])
@pytest.mark.parametrize("world", [2, 3])
def test_the_order_after_an_epoch_left_at_its_last_batch_is_that_of_one_process(
    length: int, world: int
) -> None:
    def second_epoch(size: int, rank: int = 0) -> list[list[int]]:
        sampler = RandomSampler(range(length), generator=torch.Generator().manual_seed(1))
        batches: Any = BatchSampler(sampler, size, False)
        if size < 6:
            batches = BatchSamplerShard(batches, world, rank)
        first = iter(batches)
        for _ in range(2):  # all batches, but not the end
            next(first)
        return list(batches)

    alone = second_epoch(6)
    gathered = _global_order([second_epoch(6 // world, rank) for rank in range(world)])
    assert [row for rows in gathered for row in rows][:length] == [row for rows in alone for row in rows]


def test_a_batch_that_ranks_do_not_divide_is_rejected() -> None:
    with pytest.raises(ValueError, match="batch_size=5 is not a multiple of 2"):
        _shards(10, 5, 2, split_batches=True)
    with pytest.raises(ValueError, match="batch_size=5 is not a multiple of 2"):
        IterableDatasetShard(range(10), 5, num_processes=2, split_batches=True)


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=7), max_size=12), WORLDS)
def test_batches_are_evened_out_by_whole_batches(batches: list[list[int]], world: int) -> None:
    """The batch sampler has no batch size, so the first batches of the epoch complete the last round."""
    shards = [BatchSamplerShard(batches, world, rank) for rank in range(world)]
    per_rank = [list(shard) for shard in shards]
    rounds = -(-len(batches) // world)
    assert [len(shard) for shard in shards] == [len(own) for own in per_rank] == [rounds] * world
    dealt = [per_rank[n % world][n // world] for n in range(rounds * world)]
    head, added = batches[:world], dealt[len(batches) :]
    assert dealt[: len(batches)] == batches
    assert added == [head[n % len(head)] for n in range(len(added))]
    last = batches[(rounds - 1) * world :]
    assert {shard.tail_rows for shard in shards} == {sum(map(len, last)) if added else 0}


def test_a_batch_sampler_without_a_batch_size_cannot_be_split() -> None:
    with pytest.raises(ValueError, match=r"split_batches=True .*batch_size"):
        BatchSamplerShard([[0], [1]], 2, 0, split_batches=True, even_batches=False)


@given(LENGTHS, WORLDS, st.booleans())
def test_single_samples_are_dealt_in_turn(length: int, world: int, even: bool) -> None:
    shards = [SampleShard(SequentialSampler(range(length)), world, rank, even) for rank in range(world)]
    per_rank = [list(shard) for shard in shards]
    assert [len(shard) for shard in shards] == [len(own) for own in per_rank]
    dealt = [own[n] for n in range(-(-length // world)) for own in per_rank if n < len(own)]
    assert dealt[:length] == list(range(length))
    assert len(dealt) == (-(-length // world) * world if even else length)
    assert {shard.tail_rows for shard in shards} == {-1 if even and length % world else 0}
    assert {shard.is_uneven for shard in shards} == {len(set(map(len, per_rank))) > 1}


@given(LENGTHS, BATCHES, WORLDS, st.booleans(), st.booleans())
def test_streams_are_shared_in_blocks(
    length: int, batch: int, world: int, split: bool, drop_last: bool
) -> None:
    size = batch * world if split else batch
    shards = [
        IterableDatasetShard(range(length), size, drop_last, world, rank, split) for rank in range(world)
    ]
    rows = [list(shard) for shard in shards]
    assert [len(shard) for shard in shards] == [len(own) for own in rows]
    assert len({len(own) for own in rows}) == 1
    per_rank = [[own[n : n + batch] for n in range(0, len(own), batch)] for own in rows]
    gathered = [i for batches in _global_order(per_rank) for i in batches]
    whole = length - length % (batch * world)
    assert gathered[:whole] == list(range(whole))
    assert drop_last or set(gathered) == set(range(length))
    assert {shard.tail_rows for shard in shards} == {0 if drop_last else length % (batch * world)}


@given(LENGTHS, WORLDS)
def test_shares_are_consecutive_and_differ_by_at_most_one(length: int, world: int) -> None:
    shares = [share_of(length, rank, world) for rank in range(world)]
    assert [i for share in shares for i in share] == list(range(length))
    sizes = list(map(len, shares))
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    padded = [share_of(length, rank, world, apply_padding=True) for rank in range(world)]
    assert len(set(map(len, padded))) == 1
    for share, own in zip(shares, padded, strict=True):
        assert own[: len(share)] == share


class _OfTwoParts(UserDict):  # type: ignore[type-arg]
    """A mapping whose constructor needs more than a mapping."""

    def __init__(self, values: dict[str, Any], form: object) -> None:
        super().__init__(values)


class _Selectable(list[int]):
    """A dataset like ``datasets.Dataset``, with rows selected by index."""

    def select(self, indices: list[int]) -> _Selectable:
        return _Selectable(self[i] for i in indices)


def test_all_kinds_of_inputs_are_split() -> None:
    inputs = {"list": [0, 1, 2], "tensor": torch.arange(6).reshape(3, 2), "rows": _Selectable([7, 8, 9])}
    before = dict(inputs)
    share = split_evenly(inputs, 1, 2, apply_padding=True)
    assert share["list"] == [2, 2]
    assert share["tensor"].tolist() == [[4, 5], [4, 5]]
    assert share["rows"] == _Selectable([9, 9])
    assert isinstance(share["rows"], _Selectable)
    assert inputs == before
    assert split_evenly((1, 2, 3), 0, 2, apply_padding=False) == (1, 2)
    assert split_evenly([1], 1, 2, apply_padding=False) == []
    batch = split_evenly(UserDict(a=[1, 2]), 1, 2, apply_padding=False)  # like a tokenizer's output
    assert (type(batch), batch.data) == (UserDict, {"a": [2]})
    assert split_evenly(_OfTwoParts({"a": [1, 2]}, None), 1, 2, apply_padding=False) == {"a": [2]}
    assert split_evenly(inputs, 0, 1, apply_padding=True) is inputs


def test_unsplittable_batches_are_rejected() -> None:
    with pytest.raises(ValueError, match=r"equal lengths to be split, got \{'a': 1, 'b': 2\}"):
        split_evenly({"a": [1], "b": [1, 2]}, 0, 2, apply_padding=False)
    with pytest.raises(TypeError, match="can't split a str"):
        split_evenly("text", 0, 2, apply_padding=False)


@given(st.integers(0, 2**40), st.integers(0, 5))
def test_a_seedable_order_depends_on_seed_and_epoch_alone(seed: int, epoch: int) -> None:
    one, other = (SeedableRandomSampler(range(30), data_seed=seed) for _ in range(2))
    one.set_epoch(epoch)
    other.set_epoch(epoch)
    torch.rand(epoch + 1)
    order = list(one)
    assert order == list(other)
    assert sorted(order) == list(range(30))
    assert one.epoch == epoch + 1, "a whole iteration is an epoch"
    assert order != list(one)


def test_a_seedable_order_without_a_seed_follows_torch() -> None:
    torch.manual_seed(5)
    one = SeedableRandomSampler(range(30))
    torch.rand(3)
    assert list(one) == list(SeedableRandomSampler(range(30), data_seed=5))
    assert len(SeedableRandomSampler(range(30), True, 7)) == 7


def test_the_sampler_is_found_and_replaced_below_batch_samplers() -> None:
    sampler, another = SequentialSampler(range(4)), SequentialSampler(range(2))
    shard = BatchSamplerShard(BatchSampler(sampler, 2, False), 2, 0)
    assert sampler_of(shard) is sampler is shard.sampler
    shard.sampler = another
    assert sampler_of(shard) is another
    assert sampler_of([[0, 1]]) is None
