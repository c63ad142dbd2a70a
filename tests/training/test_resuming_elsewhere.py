"""Resume in the middle of an epoch with another number of ranks: each sample is seen once."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    TensorDataset,
    get_worker_info,
)

from nblaunch import Accelerator, skip_first_batches
from nblaunch.errors import CheckpointError
from nblaunch.training.data.loader import PreparedLoader
from nblaunch.training.data.sharding import EpochPosition
from nblaunch.training.options import DataLoaderConfiguration
from tests.training import ranks

ROWS = 61

# torchdata 0.11 calls functions that torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


class _Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter(range(ROWS))


class _Buckets:
    """A batch sampler of varying sizes."""

    def __len__(self) -> int:
        return 21

    def __iter__(self) -> Any:
        starts = [n * (n + 1) // 2 for n in range(11)]
        batches = [list(range(start, start + n + 1)) for n, start in enumerate(starts[:10])]
        return iter([*batches, *([55 + n] for n in range(6)), *([n] for n in range(61, 66))])


def _rows(count: int = ROWS) -> TensorDataset:
    return TensorDataset(torch.arange(count))


# Kind of loader -> how to create it for a batch size, and its configuration.
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "shuffled": (lambda size: DataLoader(_rows(), size, shuffle=True), {}),
    "seedable": (lambda size: DataLoader(_rows(), size, shuffle=True), {"use_seedable_sampler": True}),
    "stateful": (lambda size: DataLoader(_rows(), size, shuffle=True), {"use_stateful_dataloader": True}),
    "split": (lambda size: DataLoader(_rows(), 6, shuffle=True), {"split_batches": True}),
    "dispatched": (lambda size: DataLoader(_rows(), size, shuffle=True), {"dispatch_batches": True}),
    "stream": (lambda size: DataLoader(_Stream(), size), {"dispatch_batches": False}),
    "dispatched stream": (lambda size: DataLoader(_Stream(), size), {"use_stateful_dataloader": True}),
    "single samples": (
        lambda size: DataLoader(
            _rows(), batch_size=None, shuffle=True, collate_fn=lambda row: (row[0].reshape(1),)
        ),
        {},
    ),
    "batch sampler as sampler": (
        lambda size: DataLoader(
            _rows(), sampler=BatchSampler(RandomSampler(_rows()), size, False), batch_size=None
        ),
        {},
    ),
    "varying sizes": (lambda size: DataLoader(_rows(66), batch_sampler=_Buckets()), {}),
}


def _prepared(kind: str, batch_size: int) -> tuple[Accelerator, PreparedLoader]:
    make, options = KINDS[kind]
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
    torch.manual_seed(accelerator.process_index)
    return accelerator, accelerator.prepare(make(batch_size))


Epoch = tuple[list[list[int]], int]
"""Return one rank's rows by step, and the remainder at the end of its loader."""


def _read(loader: Any, save: Any = None, save_at: int = -1) -> Epoch:
    steps: list[list[int]] = []
    for batch in loader:
        steps.append((batch[0] if isinstance(batch, (list, tuple)) else batch).tolist())
        if len(steps) == save_at:
            save()
            return steps, 0
    return steps, loader.remainder


def _part(folder: str, batch_size: int, is_resumed: bool, save_at: int) -> dict[str, list[Epoch]]:
    """Read ``save_at`` steps of an epoch of each kind and save to ``folder``, or read to its end, and the next epoch.

    The first part begins an epoch, and later parts continue at the saved position.
    """
    seen: dict[str, list[Epoch]] = {}
    for kind in KINDS:
        accelerator, loader = _prepared(kind, batch_size)
        if is_resumed:
            accelerator.load_state(f"{folder}/{kind}")
        resumes = loader.use_stateful_dataloader or not is_resumed
        reading = loader if resumes else accelerator.skip_first_batches(loader)
        seen[kind] = [_read(reading, partial(accelerator.save_state, f"{folder}/{kind}"), save_at)]
        if save_at < 0:
            seen[kind].append(_read(loader))
    return seen


def _merged(epochs: list[Epoch]) -> list[int]:
    """Return the rows that all ranks have read, without known padding of the last step."""
    steps = [
        [row for rows in step for row in rows or ()] for step in zip_longest(*(one for one, _ in epochs))
    ]
    remainder = epochs[0][1]
    if remainder > 0:
        steps[-1] = steps[-1][:remainder]
    return [row for step in steps for row in step]


@pytest.mark.parametrize("sizes", [(2, 3, 1), (1, 2)], ids=str)
def test_each_sample_is_seen_once(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """The batch size differs with the number of ranks, so step boundaries don't match."""
    parts = []
    for number, world_size in enumerate(sizes):
        save_at = -1 if number == len(sizes) - 1 else 3
        parts.append(ranks.run(_part, world_size, str(tmp_path), 5 - world_size, number > 0, save_at))
    for kind in KINDS:
        rows = 66 if kind == "varying sizes" else ROWS
        epoch = [row for part in parts for row in _merged([rank[kind][0] for rank in part])]
        assert sorted(epoch[:rows]) == list(range(rows)), (kind, parts)
        completed = epoch[rows:]  # for single samples, the number of real ones is unknown
        assert set(completed) <= set(epoch)
        assert not completed or kind == "single samples", kind
        following = _merged([rank[kind][1] for rank in parts[-1]])
        assert sorted(following[:rows]) == list(range(rows)), (kind, "the next epoch is whole")


def test_positions_count_samples_of_all_ranks() -> None:
    _, loader = _prepared("shuffled", 4)
    assert loader.position == EpochPosition()
    for step, _ in enumerate(loader, 1):
        assert loader.position == EpochPosition(4 * step, step)
    rest = loader.beginning_at(EpochPosition(8, 2))
    assert len(rest) == -(-(ROWS - 8) // 4)
    for step, _ in enumerate(rest, 1):
        assert rest.position == EpochPosition(8 + 4 * step, 2 + step)
    assert len(list(rest)) == len(loader), "its later epochs are whole"


def _stream_with_workers(folder: str, is_resumed: bool) -> str:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    model, loader = accelerator.prepare(nn.Linear(1, 1, bias=False), DataLoader(_Stream(), 4, num_workers=1))
    if not is_resumed:
        next(batches := iter(loader))
        accelerator.save_state(folder)
        del batches
        return ""
    weights = model.weight.clone() if hasattr(model, "weight") else model.module.weight.clone()
    with pytest.raises(CheckpointError) as caught:
        accelerator.load_state(folder)
    assert torch.equal(accelerator.unwrap_model(model).weight, weights)
    return str(caught.value)


def test_shared_streams_are_rejected_before_any_change(tmp_path: Path) -> None:
    _stream_with_workers(str(tmp_path / "state"), False)
    for message in ranks.run(_stream_with_workers, 2, str(tmp_path / "state"), True):
        assert "loader 0 was in the middle of an epoch when 1 processes saved it" in message
        assert "num_workers=0" in message


class _Divided(IterableDataset):
    """A stream of which every worker process of a DataLoader reads a part; two parts end with three rows each."""

    rows = range(62)

    def __iter__(self) -> Any:
        worker = get_worker_info()
        return iter(self.rows if worker is None else self.rows[worker.id :: worker.num_workers])


def _read_on_with_workers(folder: str, options: dict[str, Any]) -> tuple[list[list[int]], ...]:
    # Since Python 3.12, the fork of torch's workers warns about threads.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
    loader = accelerator.prepare(DataLoader(_Divided(), 4, num_workers=2))
    whole = []
    for batch in loader:
        whole.append(batch.tolist())
        if len(whole) == 3:
            accelerator.save_state(folder)
    accelerator.free_memory()
    loader = accelerator.prepare(DataLoader(_Divided(), 4, num_workers=2))
    accelerator.load_state(folder)
    return whole, *([batch.tolist() for batch in one] for one in (skip_first_batches(loader), loader))


@pytest.mark.parametrize(("world_size", "options"), [(1, {}), (2, {}), (2, {"dispatch_batches": False})])
def test_the_same_number_of_ranks_resumes_a_shared_stream(
    tmp_path: Path, world_size: int, options: dict[str, Any]
) -> None:
    for whole, rest, following in ranks.run(
        _read_on_with_workers, world_size, str(tmp_path / "state"), options
    ):
        assert rest == whole[3:]
        assert following == whole


def test_shared_streams_skip_whole_rounds_with_another_batch_size() -> None:
    loader = Accelerator().prepare(DataLoader(_Divided(), 3, num_workers=2))
    rest = loader.beginning_at(EpochPosition(8, 2))
    assert next(iter(rest)).tolist() == [6, 8, 10], "two batches of three"
    assert sorted(row for batch in rest for row in batch.tolist()) == list(_Divided.rows)


class _Own(IterableDataset):
    """A stream that differs between ranks and knows its position."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.at = 0

    n_shards = 2

    def shard(self, num_shards: int, index: int) -> _Own:
        return _Own(index)

    def __iter__(self) -> Any:
        while self.at < 8 + 4 * self.rank:
            self.at += 1
            yield 100 * self.rank + self.at
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def _own_streams(folder: str) -> list[list[int]]:
    options = DataLoaderConfiguration(
        use_stateful_dataloader=True, dispatch_batches=False, even_batches=False
    )
    accelerator = Accelerator(dataloader_config=options)
    loader = accelerator.prepare(DataLoader(_Own(0), 2))
    for step, _ in enumerate(loader, 1):
        if step == 2 + accelerator.process_index:
            break
    accelerator.save_state(folder)
    accelerator.free_memory()
    resumed = accelerator.prepare(DataLoader(_Own(0), 2))
    accelerator.load_state(folder)
    return [batch.tolist() for batch in resumed]


def test_each_rank_resumes_its_own_stream(tmp_path: Path) -> None:
    """Each rank's state is saved: here, ranks have read different amounts of different streams."""
    first, second = ranks.run(_own_streams, 2, str(tmp_path / "state"))
    assert first == [[5, 6], [7, 8]]
    assert second == [[107, 108], [109, 110], [111, 112]]
    assert (tmp_path / "state" / "dl_state_dict_rank1.bin").is_file()
