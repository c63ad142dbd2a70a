"""Loaders with another order than a plain batch sampler's: one rank sees each sample in every epoch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, TensorDataset

from nblaunch import Accelerator
from nblaunch.training.data.prepare import LoaderTarget, shard_loader
from nblaunch.training.data.samplers import SeedableRandomSampler
from nblaunch.training.options import DataLoaderConfiguration
from tests.training import ranks


def _rows(count: int) -> TensorDataset:
    return TensorDataset(torch.arange(count))


def test_single_samples_of_an_indexed_dataset_keep_their_order() -> None:
    torch.manual_seed(3)
    given = DataLoader(_rows(8), batch_size=None, shuffle=True)
    loader = Accelerator().prepare(given)
    torch.manual_seed(4)  # from now on, the loader's own generator determines the order
    order = [row.item() for (row,) in loader]
    assert sorted(order) == list(range(8))
    assert order != list(range(8))
    assert len(loader) == 8
    assert [row.item() for (row,) in Accelerator().skip_first_batches(loader, 6)] != order[6:], (
        "another epoch"
    )
    with pytest.raises(ValueError, match="single samples"):
        shard_loader(
            given,
            LoaderTarget(rank=0, world_size=2, device=torch.device("cpu")),
            DataLoaderConfiguration(dispatch_batches=True),
        )


class _Unsized(Sampler[Any]):
    """A sampler without a length, like a sampler by sample size whose ``len`` raises ValueError."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Any:
        return iter(self.items)

    def __len__(self) -> int:
        raise ValueError("the number of batches is not known")


class _Two(BatchSampler):
    """A batch sampler that yields two batches, whatever its sampler."""

    def __len__(self) -> int:
        return 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("split_batches", [False, True])
def test_an_unknown_length_is_accepted(rank: int, split_batches: bool) -> None:
    dynamic = _Unsized([[0, 1], [2, 3, 4], [5, 6]])
    alone = Accelerator().prepare(DataLoader(_rows(7), batch_sampler=dynamic))
    assert [batch.tolist() for (batch,) in alone] == dynamic.items
    given = DataLoader(_rows(7), batch_sampler=_Two(_Unsized(list(range(7))), 4, False))
    config = DataLoaderConfiguration(split_batches=split_batches, even_batches=False)
    shard = shard_loader(given, LoaderTarget(rank, 2, rng_types=()), config)
    whole = [[0, 1], [4, 5], [2, 3], [6]] if split_batches else [[0, 1, 2, 3], [4, 5, 6]]
    half = len(whole) // 2
    assert [batch.tolist() for (batch,) in shard] == whole[rank * half : (rank + 1) * half]
    assert len(shard) == half


_UNUSUAL: dict[str, Any] = {
    "a batch sampler as sampler": lambda rows: DataLoader(
        rows, sampler=BatchSampler(RandomSampler(rows), 2, False), batch_size=None
    ),
    "one inside another": lambda rows: DataLoader(
        rows, sampler=BatchSampler(RandomSampler(rows), 2, False), collate_fn=lambda lists: lists[0]
    ),
    "single samples": lambda rows: DataLoader(
        rows, batch_size=None, shuffle=True, collate_fn=lambda row: (row[0].reshape(1),)
    ),
    "batches of any size": lambda rows: DataLoader(
        rows, batch_sampler=[[0, 1, 2], [3], [4, 5], [6, 7, 8, 9], [10, 11]]
    ),
}


def _epochs_of_unusual_loaders() -> dict[str, list[list[int]]]:
    """Return this rank's rows in two epochs of each loader, after every rank has drawn differently from its
    generator.
    """
    accelerator = Accelerator()
    torch.manual_seed(accelerator.process_index)
    seen = {}
    for name, make in _UNUSUAL.items():
        loader = accelerator.prepare(make(_rows(12)))
        seen[name] = [[row for (batch,) in loader for row in batch.tolist()] for _ in range(2)]
    return seen


def test_ranks_share_the_data_of_unusual_loaders() -> None:
    first, second = ranks.run(_epochs_of_unusual_loaders, 2)
    for name in _UNUSUAL:
        epochs = [one + other for one, other in zip(first[name], second[name], strict=True)]
        added = [0, 1, 2] if name == "batches of any size" else []
        assert all(sorted(rows) == sorted([*range(12), *added]) for rows in epochs), (name, epochs)
        assert (epochs[0] != epochs[1]) == (not added), "shuffled anew"


def test_a_new_data_seed_applies_to_prepared_loaders() -> None:
    given = DataLoader(_rows(12), shuffle=True)
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1)
    orders = []
    for seed in (1, 2, 1):
        config.data_seed = seed
        orders.append([row.item() for (row,) in Accelerator(dataloader_config=config).prepare(given)])
    assert orders[0] == orders[2] != orders[1]
    own = DataLoader(_rows(12), sampler=SeedableRandomSampler(range(12), data_seed=7))
    unseeded = DataLoaderConfiguration(use_seedable_sampler=True)
    prepared = Accelerator(dataloader_config=unseeded).prepare(own)
    assert [row.item() for (row,) in prepared] == list(SeedableRandomSampler(range(12), data_seed=7))
