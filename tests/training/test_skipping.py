"""Epochs that begin in the middle, and loaders that know their position."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, TensorDataset

from nblaunch import Accelerator, context
from nblaunch.training.data.loader import PreparedLoader
from nblaunch.training.data.resuming import SkipDataLoader, skip_first_batches
from nblaunch.training.data.samplers import SkipBatchSampler
from nblaunch.training.data.sharding import BatchSamplerShard
from nblaunch.training.options import DataLoaderConfiguration
from tests.training import ranks


class _Noting(torch.utils.data.Dataset):
    """A dataset that records loaded indices."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        self.loaded.append(index)
        return index


class _Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(8))


def _lists(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("is_prepared", [False, True])
def test_skipped_batches_are_not_loaded(is_prepared: bool) -> None:
    dataset = _Noting(8)
    given_loader: Any = DataLoader(dataset, batch_size=2)
    loader = Accelerator().prepare(given_loader) if is_prepared else given_loader
    rest = skip_first_batches(loader, 2)
    assert isinstance(rest, PreparedLoader) == is_prepared
    assert len(rest) == 2
    assert _lists(rest) == [[4, 5], [6, 7]]
    assert dataset.loaded == [4, 5, 6, 7]
    assert len(_lists(rest)) == 4, "skipped once: the next epoch is whole"


class _SizedStream(_Stream):
    def __len__(self) -> int:
        return 8


@pytest.mark.parametrize("is_prepared", [False, True])
def test_the_rest_of_a_stream_knows_its_length(is_prepared: bool) -> None:
    given_loader: Any = DataLoader(_SizedStream(), batch_size=2)
    rest = skip_first_batches(Accelerator().prepare(given_loader) if is_prepared else given_loader, 3)
    assert len(rest) == len(_lists(rest)) == 1
    assert len(rest) == 4, "the next epoch is whole"
    assert len(skip_first_batches(rest, 9)) == 0


def test_the_board_shows_the_whole_epoch_of_a_stream() -> None:
    rest = Accelerator().skip_first_batches(
        Accelerator().prepare(DataLoader(_SizedStream(), batch_size=2)), 3
    )
    for _ in rest:
        board = context.current().slot.read(0)
        assert (board.step, board.total) == (4, 4)


@pytest.mark.parametrize("is_prepared", [False, True])
def test_batches_are_skipped_where_worker_processes_read(is_prepared: bool) -> None:
    given_loader: Any = DataLoader(range(8), batch_size=2, num_workers=1)
    loader = Accelerator().prepare(given_loader) if is_prepared else given_loader
    rest = skip_first_batches(loader, 2)
    assert _lists(rest) == [[4, 5], [6, 7]]
    assert len(_lists(rest)) == 4


def test_a_stream_is_read_and_dropped() -> None:
    assert _lists(skip_first_batches(DataLoader(_Stream(), batch_size=2), 3)) == [[6, 7]]
    prepared = Accelerator().prepare(DataLoader(_Stream(), batch_size=2))
    rest = skip_first_batches(prepared, 3)
    assert _lists(rest) == [[6, 7]]
    assert len(_lists(rest)) == 4
    plain = SkipDataLoader(list(range(8)), skip_batches=1, batch_size=4)
    assert len(plain) == 1
    assert _lists(plain) == [[4, 5, 6, 7]]


def test_a_batch_sampler_given_as_sampler_is_skipped_too() -> None:
    sampler = BatchSampler(SequentialSampler(range(8)), 2, False)
    loader = Accelerator().prepare(
        DataLoader(TensorDataset(torch.arange(8)), sampler=sampler, batch_size=None)
    )
    assert [batch.tolist() for (batch,) in skip_first_batches(loader, 3)] == [[6, 7]]


def test_a_negative_number_is_rejected() -> None:
    with pytest.raises(ValueError, match="num_batches=-1 is negative"):
        skip_first_batches(DataLoader(range(4)), -1)


def test_the_epoch_goes_on_with_its_own_order() -> None:
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1)
    accelerator = Accelerator(dataloader_config=config)
    loader = accelerator.prepare(DataLoader(range(12), batch_size=2, shuffle=True))
    epochs = [_lists(loader) for _ in range(3)]
    loader.set_epoch(1)
    rest = accelerator.skip_first_batches(loader, 2)
    assert rest.iteration == 1
    assert _lists(rest) == epochs[1][2:]
    assert (rest.iteration, loader.iteration) == (2, 2)
    assert _lists(loader) == epochs[2]


def test_the_board_goes_on_in_the_middle() -> None:
    accelerator = Accelerator()
    rest = accelerator.skip_first_batches(accelerator.prepare(DataLoader(range(8), batch_size=2)), 3)
    for _ in rest:
        board = context.current().slot.read(0)
        assert (board.step, board.total) == (4, 4)
        assert rest.end_of_dataloader


@given(
    st.integers(0, 40), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.integers(0, 12), st.booleans()
)
def test_skipped_and_remaining_batches_make_an_epoch(
    length: int, batch_size: int, world_size: int, drop_last: bool, skipped: int, even: bool
) -> None:
    for rank in range(world_size):
        shard = BatchSamplerShard(
            BatchSampler(range(length), batch_size, drop_last), world_size, rank, even_batches=even
        )
        whole = list(shard)
        rest = SkipBatchSampler(shard, skipped)
        assert len(rest) == len(whole[skipped:])
        assert list(rest) == whole[skipped:]
        assert list(rest) == whole


# --- state -----------------------------------------------------------------------------------------------------------


def _stateful(shuffle: bool = True, num_workers: int = 0) -> PreparedLoader:
    torch.manual_seed(0)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    loader = DataLoader(range(20), batch_size=2, shuffle=shuffle, num_workers=num_workers)
    return accelerator.prepare(loader)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("taken", [1, 4, 10])
def test_loaders_resume_at_their_position(taken: int, num_workers: int) -> None:
    loader = _stateful(num_workers=num_workers)
    epochs: list[list[list[int]]] = [_lists(loader)]
    state: Any = None
    seen = []
    for number, batch in enumerate(loader, 1):
        seen.append(batch.tolist())
        if number == taken:
            state = pickle.loads(pickle.dumps(loader.state_dict()))
    epochs += [seen, _lists(loader)]
    resumed = _stateful(num_workers=num_workers)
    resumed.load_state_dict(state)
    # At its last batch, an epoch counts as complete, so the next one follows.
    expected = epochs[1][taken:] or epochs[2]
    assert _lists(resumed) == expected
    assert resumed.iteration == (2 if taken < 10 else 3)
    if taken < 10:
        assert _lists(resumed) == epochs[2]


def _train_on_pairs(folder: Path, resumes: bool) -> list[tuple[Any, ...]]:
    """Read two loaders alternately; return each pair of batches with a number from the global generator."""
    torch.manual_seed(resumes)
    accelerator = Accelerator()
    loaders = [DataLoader(range(length), batch_size=2, shuffle=True) for length in (12, 16)]
    first, second = accelerator.prepare(*loaders)
    if resumes:
        accelerator.load_state(folder)
        first, second = map(accelerator.skip_first_batches, (first, second))
    seen: list[tuple[Any, ...]] = []
    for one, other in zip(first, second, strict=False):
        seen.append((one.tolist(), other.tolist(), float(torch.rand(()))))
        if len(seen) == 2 and not resumes:
            accelerator.save_state(folder)
    return seen


def test_all_loaders_of_a_resumed_epoch_leave_the_generator_alone(tmp_path: Path) -> None:
    assert _train_on_pairs(tmp_path / "state", False)[2:] == _train_on_pairs(tmp_path / "state", True)


def _resumable(kind: str, folder: Path | None = None) -> tuple[Accelerator, PreparedLoader]:
    torch.manual_seed(0)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    dataset: Any = _Stream() if "stream" in kind else range(8)
    num_workers = 1 if "worker" in kind else 0
    loader = DataLoader(dataset, batch_size=1, shuffle=kind == "shuffled", num_workers=num_workers)
    loader = accelerator.prepare(loader)
    if folder is not None:
        accelerator.load_state(folder)
    return accelerator, loader


@pytest.mark.parametrize("kind", ["in order", "shuffled", "stream", "stream of a worker"])
@pytest.mark.parametrize("num_seen", [4, 8])
def test_stateful_loaders_resume_from_a_partial_loader(tmp_path: Path, kind: str, num_seen: int) -> None:
    _, loader = _resumable(kind)
    epochs = [_lists(loader) for _ in range(3)]
    accelerator, loader = _resumable(kind)
    for number, _ in enumerate(accelerator.skip_first_batches(loader, 2), 3):
        if number == num_seen:
            accelerator.save_state(tmp_path / "state")
    _, loader = _resumable(kind, tmp_path / "state")
    expected = [epochs[0][4:], epochs[1]] if num_seen == 4 else epochs[1:]
    assert [_lists(loader) for _ in range(2)] == expected


@pytest.mark.parametrize("kind", ["in order", "shuffled", "stream", "stream of a worker"])
@pytest.mark.parametrize("num_batches", [None, 4])
def test_epochs_after_a_resumed_one_are_complete(tmp_path: Path, kind: str, num_batches: int | None) -> None:
    accelerator, loader = _resumable(kind)
    epochs: list[Any] = [_lists(loader) for _ in range(3)]
    accelerator, loader = _resumable(kind)
    for number, _ in enumerate(loader, 1):
        if number == 4:
            accelerator.save_state(tmp_path / "middle")
    accelerator, loader = _resumable(kind, tmp_path / "middle")
    assert _lists(accelerator.skip_first_batches(loader, num_batches)) == epochs[0][4:]
    accelerator.save_state(tmp_path / "end")
    assert _lists(loader) == epochs[1]
    _, loader = _resumable(kind, tmp_path / "end")
    assert _lists(loader) == epochs[1], "the state in between was that of the epoch's end"


@pytest.mark.parametrize("kind", ["in order", "shuffled", "stream", "stream of a worker"])
@pytest.mark.parametrize("num_batches", [None, 4])
def test_batches_of_a_partial_loader_are_skipped_once(
    tmp_path: Path, kind: str, num_batches: int | None
) -> None:
    accelerator, loader = _resumable(kind)
    epochs = [_lists(loader) for _ in range(2)]
    accelerator, loader = _resumable(kind)
    for number, _ in enumerate(accelerator.skip_first_batches(loader, 2), 3):
        if number == 4:
            accelerator.save_state(tmp_path / "state")
    accelerator, loader = _resumable(kind, tmp_path / "state")
    assert _lists(accelerator.skip_first_batches(loader, num_batches)) == epochs[0][4:]
    assert _lists(loader) == epochs[1]


def test_loaders_resume_without_skip_first_batches(tmp_path: Path) -> None:
    accelerator, loader = _resumable("shuffled")
    expected = _lists(loader)[4:]
    accelerator, loader = _resumable("shuffled")
    for number, _ in enumerate(accelerator.skip_first_batches(loader, 2), 3):
        if number == 4:
            accelerator.save_state(tmp_path / "state")
    accelerator, loader = _resumable("shuffled", tmp_path / "state")
    accelerator.skip_first_batches(loader)
    assert _lists(loader) == expected


def test_a_state_at_the_end_of_an_epoch_replaces_a_loaded_one() -> None:
    loader = _stateful(shuffle=False)
    end = [loader.state_dict() for _ in loader][-1]
    middle = [loader.state_dict() for _ in loader][3]
    loader.load_state_dict(middle)
    loader.load_state_dict(end)
    assert len(_lists(loader)) == 10


def test_missing_torchdata_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "torchdata", raising=False)
    with pytest.raises(ImportError, match="pip install torchdata"):
        DataLoaderConfiguration(use_stateful_dataloader=True)


def _resume_on_ranks(dispatch: bool) -> tuple[list[list[int]], list[list[int]]]:
    config = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=dispatch)
    accelerator = Accelerator(dataloader_config=config)

    def prepared() -> PreparedLoader:
        return accelerator.prepare(DataLoader(range(20), batch_size=2, shuffle=True))

    loader = prepared()
    seen, state = [], None
    for number, batch in enumerate(loader, 1):
        seen.append(batch.tolist())
        if number == 2:
            state = loader.state_dict()
    resumed = prepared()
    resumed.load_state_dict(state)
    return seen[2:], _lists(resumed)


@pytest.mark.parametrize("dispatch", [False, True])
def test_ranks_resume_at_their_positions(dispatch: bool) -> None:
    for expected, resumed in ranks.run(_resume_on_ranks, 2, dispatch):
        assert resumed == expected
        assert len(expected) == 3
