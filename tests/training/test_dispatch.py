"""Loaders whose data rank 0 reads for all ranks, on real ranks."""

from __future__ import annotations

import math
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from nblaunch import Accelerator
from nblaunch.training.data.dispatcher import DataLoaderDispatcher
from nblaunch.training.data.loader import DataLoaderShard
from nblaunch.training.options import DataLoaderConfiguration
from tests.training import ranks


class _Stream(IterableDataset):
    """A dataset of numbers that only rank 0 may read."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        assert Accelerator().is_main_process
        return iter(range(self.count))


class _Words(IterableDataset):
    def __iter__(self) -> Any:
        for row in range(8):
            yield UserDict(number=torch.tensor(row), flag=torch.tensor(row % 2 == 0), word=f"word {row}")


def _accelerator(**options: Any) -> Accelerator:
    return Accelerator(dataloader_config=DataLoaderConfiguration(**{"dispatch_batches": True, **options}))


Epoch = tuple[list[list[int]], list[bool], list[int], list[int], int]


def _read(count: int, batch_size: int, options: dict[str, Any], is_stream: bool, drop_last: bool) -> Epoch:
    accelerator = _accelerator(**options)
    data: Any = _Stream(count) if is_stream else list(range(count))
    loader = accelerator.prepare(DataLoader(data, batch_size=batch_size, drop_last=drop_last))
    assert isinstance(loader, DataLoaderDispatcher)
    batches, ends, remainders, gathered = [], [], [], []
    for batch in loader:
        batches.append(batch.tolist())
        ends.append(loader.end_of_dataloader)
        remainders.append(loader.remainder)
        gathered += accelerator.gather_for_metrics(batch).tolist()
    length = -1 if is_stream else len(loader)
    assert length in (-1, len(batches))
    return batches, ends, remainders, gathered, loader.iteration


@pytest.mark.parametrize("is_stream", [False, True])
def test_rank_0_sends_each_rank_its_part(is_stream: bool) -> None:
    zero, one = ranks.run(_read, 2, 11, 2, {}, is_stream, False)
    assert zero[0] == [[0, 1], [4, 5], [8, 9]]
    assert one[0] == [[2, 3], [6, 7], [10, 0]]
    for _, ends, remainders, gathered, iteration in (zero, one):
        assert ends == [False, False, True]
        assert remainders[-1] == 3
        assert gathered == list(range(11))
        assert iteration == 1


def _read_many(cases: list[tuple[int, int, bool, bool]]) -> list[Epoch]:
    return [
        _read(count, size, {"split_batches": split}, True, drop_last)
        for count, size, split, drop_last in cases
    ]


@pytest.mark.parametrize("world_size", [2, 3])
def test_each_sample_is_seen_as_documented(world_size: int) -> None:
    """One job runs many cases, because a separate job for each would take much longer."""
    cases: list[tuple[int, int, bool, bool]] = []

    @settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @given(st.integers(0, 25), st.integers(1, 4), st.booleans(), st.booleans())
    def collect(count: int, size: int, split: bool, drop_last: bool) -> None:
        cases.append((count, size * (world_size if split else 1), split, drop_last))

    collect()
    answers = ranks.run(_read_many, world_size, cases)
    for number, (count, batch_size, split, drop_last) in enumerate(cases):
        epochs = [answers[rank][number] for rank in range(world_size)]
        round_size = batch_size if split else batch_size * world_size
        whole, rest = divmod(count, round_size)
        num_seen = whole * round_size if drop_last else count
        for batches, _ends, _remainders, gathered, _ in epochs:
            assert gathered == list(range(num_seen))
            assert len(batches) == whole + (1 if rest and not drop_last else 0)
        sizes = [[len(batch) for batch in epoch[0]] for epoch in epochs]
        assert all(one == sizes[0] for one in sizes), "ranks get batches of equal size"
        if rest and not drop_last:
            assert sizes[0][-1] == math.ceil(rest / world_size)


def _rest(kind: str, options: dict[str, Any]) -> list[Any]:
    """Return the second epoch, and the rest of it after two rounds."""
    read = []
    for skipped in (0, 2):
        accelerator, data = _accelerator(**options), torch.arange(19)
        if kind == "stream":
            loader = DataLoader(_Stream(19), 4)
        elif kind == "lists":
            sampler = BatchSampler(range(19), 4, drop_last=False)
            loader = DataLoader(data, None, sampler=sampler)  # type: ignore[arg-type]
        else:
            generator = torch.Generator().manual_seed(3)
            loader = DataLoader(data, 4, shuffle=True, generator=generator)  # type: ignore[arg-type]
        prepared = accelerator.prepare(loader)
        _ = list(prepared)
        torch.manual_seed(1)
        rest = accelerator.skip_first_batches(prepared, skipped)
        read.append([batch.tolist() for batch in rest])
        read.append(torch.rand(1).item())
    return read


KINDS = ("shuffled", "stream", "lists")


def _rests(options: dict[str, Any]) -> list[list[Any]]:
    return [_rest(kind, options) for kind in KINDS]


@pytest.mark.parametrize("options", [{}, {"split_batches": True}, {"use_stateful_dataloader": True}])
def test_the_rest_of_an_epoch_is_completed_alike(options: dict[str, Any]) -> None:
    on_ranks = ranks.run(_rests, 2, options)
    for kind, *of_kind in zip(KINDS, *on_ranks, strict=True):
        for whole, drawn, rest, drawn_by_rest in of_kind:
            assert rest == whole[2:], kind
            assert drawn_by_rest == drawn, kind
        first, last = of_kind[0][0], of_kind[1][0]
        assert last[-1][-1] == first[0][0], f"the first row completes the last batch of {kind}"


class _Texts(IterableDataset):
    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return (f"text {number}" for number in range(self.count))


def _skip_twice() -> list[Any]:
    accelerator = _accelerator()
    loader = accelerator.prepare(DataLoader(torch.arange(19), 2))  # type: ignore[arg-type]
    rest = accelerator.skip_first_batches(accelerator.skip_first_batches(loader, 1), 1)
    return [[batch.tolist() for batch in read] for read in (rest, loader)]


def test_an_epoch_that_is_skipped_twice_is_completed_alike() -> None:
    for rest, epoch in ranks.run(_skip_twice, 2):
        assert rest == epoch[2:]


def _doubled(batch: Any, rows: slice, process_index: int, num_processes: int) -> Any:
    return batch[rows] * 2


def _default_kind() -> tuple[bool, bool, bool]:
    accelerator = Accelerator()
    stream, rows = accelerator.prepare(DataLoader(_Stream(4)), DataLoader(range(4)))
    stays = accelerator.prepare_data_loader(DataLoader(_Stream(4)), device_placement=False)
    return tuple(isinstance(one, DataLoaderDispatcher) for one in (stream, rows, stays))  # type: ignore[return-value]


def test_streams_are_dispatched_unless_set_otherwise() -> None:
    for world_size in (1, 2):
        assert ranks.run(_default_kind, world_size) == [(True, False, False)] * world_size


def test_a_lone_process_dispatches_batches_of_any_content() -> None:
    shared = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    for data in (_Texts(5), list(_Texts(5))):
        read = [list(accelerator.prepare(DataLoader(data, 2))) for accelerator in (_accelerator(), shared)]
        assert read[0] == read[1] == [["text 0", "text 1"], ["text 2", "text 3"], ["text 4"]]
        assert isinstance(_accelerator().prepare(DataLoader(data)), DataLoaderDispatcher)
        assert isinstance(shared.prepare(DataLoader(data)), DataLoaderShard)
    loader = _accelerator().prepare(DataLoader(_Stream(5), 2))
    for _ in loader:
        assert loader.end_of_dataloader == (loader.remainder == 1)
    loader = _accelerator().prepare_data_loader(DataLoader(_Stream(4), 2), slice_fn_for_dispatch=_doubled)
    assert [batch.tolist() for batch in loader] == [[0, 2], [4, 6]]


def _cut_all(batch: Any, rows: slice, process_index: int, num_processes: int) -> Any:
    return UserDict({key: value[rows] for key, value in batch.items()})


def _structures() -> list[Any]:
    accelerator = _accelerator(split_batches=True)
    loader = accelerator.prepare_data_loader(
        DataLoader(_Words(), batch_size=4, collate_fn=_collate), slice_fn_for_dispatch=_cut_all
    )
    return [
        (type(batch).__name__, batch["number"].tolist(), batch["flag"].tolist(), batch["words"])
        for batch in loader
    ]


def _collate(rows: list[Any]) -> Any:
    flags = torch.stack([row["flag"] for row in rows])
    return UserDict(
        number=torch.stack([row["number"] for row in rows]), flag=flags, words=tuple(r["word"] for r in rows)
    )


def test_structures_types_and_other_leaves_arrive() -> None:
    words = [[(f"word {i}", f"word {i + 1}") for i in (start, start + 2)] for start in (0, 4)]
    assert ranks.run(_structures, 2) == [
        [("UserDict", [0, 1], [True, False], words[0][0]), ("UserDict", [4, 5], [True, False], words[1][0])],
        [("UserDict", [2, 3], [True, False], words[0][1]), ("UserDict", [6, 7], [True, False], words[1][1])],
    ]


def _own_slices() -> list[list[int]]:
    def every_other(batch: Any, rows: slice, process_index: int, num_processes: int) -> Any:
        return batch[process_index::num_processes]

    accelerator = _accelerator()
    loader = accelerator.prepare_data_loader(
        DataLoader(range(8), batch_size=2), slice_fn_for_dispatch=every_other
    )
    return [batch.tolist() for batch in loader]


def test_a_custom_slice_function_is_used() -> None:
    assert ranks.run(_own_slices, 2) == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]


def _fail(kind: str) -> tuple[str, str]:
    accelerator = _accelerator(split_batches="split" in kind)
    try:
        list(accelerator.prepare(_failing_loader(kind)))
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def _failing_loader(kind: str) -> DataLoader:
    if kind == "uneven in the middle":
        return DataLoader(range(7), batch_sampler=[[0, 1], [2], [3, 4], [5, 6]])
    if kind == "different shapes":
        return DataLoader([torch.zeros(2), torch.zeros(3)], batch_size=1)
    if kind == "words":
        return DataLoader(["a", "b"], batch_size=1)
    if kind == "numbers and words, split":
        return DataLoader([(1, "a"), (2, "b")], batch_size=2)
    if kind == "nothing":
        return DataLoader([1, 2], batch_size=1, collate_fn=lambda rows: [])
    return DataLoader([1, 2, 3, None], batch_size=1)


FAILURES = {
    "uneven in the middle": "a batch in the middle of the epoch has 3 rows",
    "different shapes": "these can't be joined",
    "words": "a batch has a str",
    "numbers and words, split": "a batch has a str",
    "nothing": "sends tensors, but a batch of type list has none",
    "the collate_fn fails": "found <class 'NoneType'>",
}


def test_read_errors_of_rank_0_reach_all_ranks() -> None:
    """One job makes all mistakes, because an error leaves nothing behind that would disturb the next loader."""
    zeros, ones = ranks.run(lambda: [_fail(kind) for kind in FAILURES], 2)
    for zero, one, message in zip(zeros, ones, FAILURES.values(), strict=True):
        assert message in zero[1]
        assert one[0] == "RuntimeError"
        assert one[1].startswith(f"rank 0, which reads the data for all ranks, failed: {zero[0]}: ")
        assert message in one[1]


def test_undispatchable_data_is_rejected() -> None:
    from nblaunch.training.data.prepare import LoaderTarget, shard_loader

    target = LoaderTarget(rank=0, world_size=2, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="batch_size=3 is not a multiple of 2"):
        shard_loader(
            DataLoader(range(6), batch_size=3),
            target,
            DataLoaderConfiguration(dispatch_batches=True, split_batches=True),
        )
    with pytest.raises(ValueError, match="device_placement=False"):
        shard_loader(
            DataLoader(range(6)), LoaderTarget(0, 2, None), DataLoaderConfiguration(dispatch_batches=True)
        )


def _break_and_go_on() -> tuple[list[list[int]], list[list[int]]]:
    accelerator = _accelerator()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(8)), batch_size=2, shuffle=True))
    for _ in loader:
        break
    accelerator.wait_for_everyone()
    first = [batch.tolist() for (batch,) in loader]
    return first, [batch.tolist() for (batch,) in accelerator.skip_first_batches(loader, 1)]


def test_epochs_can_be_left_early() -> None:
    zero, one = ranks.run(_break_and_go_on, 2)
    assert sorted(index for batch in zero[0] + one[0] for index in batch) == list(range(8))
    assert len(zero[1]) == len(one[1]) == 1


def _draw_after_resuming(folder: str) -> tuple[list[float], list[float]]:
    accelerator = Accelerator()
    torch.manual_seed(accelerator.process_index)
    dispatched, own = accelerator.prepare(
        DataLoader(_Stream(8), batch_size=2), DataLoader(range(4), batch_size=2)
    )
    for step, _ in enumerate(dispatched):
        if step == 0:
            accelerator.save_state(folder)
    list(own)
    drawn = torch.rand(3).tolist()
    accelerator.load_state(folder)
    list(accelerator.skip_first_batches(dispatched))
    list(own)
    return drawn, torch.rand(3).tolist()


def test_resumed_ranks_without_reading_draw_equal_numbers(
    tmp_path: Path,
) -> None:
    for drawn, again in ranks.run(_draw_after_resuming, 2, str(tmp_path / "state")):
        assert drawn == again


def _rest_of_epoch(folder: str, is_stateful: bool, shuffle: bool, save_at: int) -> dict[str, list[list[int]]]:
    """Read an epoch and save at a step; then read the rest like a resumed job."""
    torch.manual_seed(3)
    read: dict[str, list[list[int]]] = {"whole": [], "rest": []}
    for part in read:
        accelerator = _accelerator(use_stateful_dataloader=is_stateful)
        loader = accelerator.prepare(DataLoader(torch.arange(11), batch_size=2, shuffle=shuffle))
        if part == "rest":
            accelerator.load_state(folder)
            loader = accelerator.skip_first_batches(loader)
        for batch in loader:
            read[part].append(batch.tolist())
            if part == "whole" and len(read[part]) == save_at:
                accelerator.save_state(folder)
    return read


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("is_stateful", [False, True])
def test_a_resumed_epoch_is_filled_from_its_start(tmp_path: Path, is_stateful: bool, shuffle: bool) -> None:
    for rank in ranks.run(_rest_of_epoch, 2, str(tmp_path), is_stateful, shuffle, 1):
        assert rank["rest"] == rank["whole"][1:]
        assert len(rank["whole"]) == 3
