"""Data that is already divided among ranks is read completely, and once."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import tqdm
from datasets.distributed import split_dataset_by_node
from torch.utils.data import (
    ChainDataset,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
)

from nblaunch import Accelerator
from nblaunch.training.data.prepare import prepare_data_loader
from nblaunch.training.options import DataLoaderConfiguration
from tests.training import ranks

ROWS = 24


@pytest.fixture(autouse=True)
def no_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the progress bars of ``datasets`` from starting a permanent thread."""
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)


class Files(IterableDataset[int]):
    """A dataset with the rows of one rank's files."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size

    def __iter__(self) -> Any:
        return iter(range(self.rank, ROWS, self.world_size))


class Wrapped(IterableDataset[Any]):
    """A stream that reads another one."""

    def __init__(self, source: Any) -> None:
        self.sources = [source]

    def __iter__(self) -> Any:
        return iter(self.sources[0])


def _stream(num_shards: int) -> datasets.IterableDataset:
    whole = datasets.Dataset.from_dict({"row": list(range(ROWS))})
    return whole.to_iterable_dataset(num_shards=num_shards).with_format("torch")


def _given(kind: str, rank: int, world_size: int) -> tuple[DataLoader[Any], bool | None]:
    """Return a loader of the rank's part, and whether the configuration must declare that the data is divided."""
    if kind == "files":
        return DataLoader(Files(rank, world_size), batch_size=2), True
    if kind == "sampler":
        sampler = DistributedSampler(range(ROWS), world_size, rank)
        return DataLoader(TensorDataset(torch.arange(ROWS)), batch_size=2, sampler=sampler), True
    if kind == "subset":
        part = Subset(range(ROWS), range(rank, ROWS, world_size))
        return DataLoader(part, batch_size=2, shuffle=True), True
    num_shards = {"examples": 1, "shards": 4, "wrapped": 4, "chained": 4}[kind]
    part = split_dataset_by_node(_stream(num_shards), rank, world_size)
    wrap = {"wrapped": Wrapped, "chained": lambda stream: ChainDataset([stream])}.get(
        kind, lambda stream: stream
    )
    return DataLoader(wrap(part), batch_size=2), None


def _rows(batch: Any) -> torch.Tensor:
    return batch["row"] if isinstance(batch, dict) else batch[0] if isinstance(batch, list) else batch


def _read(kind: str, folder: str, evens: bool) -> tuple[list[int], list[int], list[int], list[str]]:
    """Return the rank's rows, the gathered rows, the rows of a resumed epoch, and warnings."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        state = Accelerator().state
        given, is_sharded = _given(kind, state.process_index, state.num_processes)
        config = DataLoaderConfiguration(data_is_sharded=is_sharded, even_batches=evens)
        accelerator = Accelerator(dataloader_config=config)
        loader = accelerator.prepare(given)
        mine: list[int] = []
        everyones: list[int] = []
        for batch in loader:
            mine += _rows(batch).tolist()
            everyones += accelerator.gather_for_metrics(_rows(batch)).tolist()
        resumed: list[int] = []
        for number, batch in enumerate(loader, 1):
            resumed += _rows(batch).tolist()
            if number == 2:
                accelerator.save_state(folder)
                break
        accelerator.load_state(folder)
        for batch in accelerator.skip_first_batches(loader):
            resumed += _rows(batch).tolist()
    return mine, everyones, resumed, [str(one.message) for one in shown]


@pytest.mark.parametrize("kind", ["files", "sampler", "subset", "examples", "shards", "wrapped", "chained"])
def test_parts_of_ranks_are_read_whole(kind: str, tmp_path: Path) -> None:
    parts = ranks.run(_read, 2, kind, str(tmp_path / "state"), False)
    assert Counter(row for mine, *_ in parts for row in mine) == Counter(range(ROWS))
    assert Counter(row for _, _, resumed, _ in parts for row in resumed) == Counter(range(ROWS))
    for mine, everyones, _, shown in parts:
        assert len(mine) == ROWS // 2
        assert sorted(everyones) == list(range(ROWS))
        assert shown == []


def test_parts_that_may_be_uneven_are_named_once(tmp_path: Path) -> None:
    for kind, is_named in (("files", True), ("sampler", False)):
        shown = [texts for *_, texts in ranks.run(_read, 2, kind, str(tmp_path / "state"), True)]
        assert [len(texts) for texts in shown] == [int(is_named), 0]
        if is_named:
            assert shown[0][0].startswith(
                "each rank reads its own part of the Files, and even_batches=True does not pad"
            )
            assert "Train in `with accelerator.join_uneven_inputs" in shown[0][0]


def _prepare(part: int, num_parts: int, options: dict[str, Any]) -> Any:
    loader = DataLoader(split_dataset_by_node(_stream(4), part, num_parts), batch_size=2)
    return prepare_data_loader(loader, num_processes=2, process_index=1, even_batches=False, **options)


def test_parts_for_another_job_are_an_error() -> None:
    for part, num_parts in ((0, 2), (1, 4)):
        with pytest.raises(
            ValueError, match=f"is already part {part} of {num_parts}, and this is rank 1 of 2: prepare"
        ):
            _prepare(part, num_parts, {})
    with pytest.raises(
        ValueError, match="dispatch_batches=True makes rank 0 read for all ranks, but its IterableDataset is"
    ):
        _prepare(1, 2, {"dispatch_batches": True, "device": "cpu", "put_on_device": True})
    with pytest.raises(ValueError, match="split_batches=True divides global batches among the ranks"):
        _prepare(1, 2, {"split_batches": True})
    with pytest.raises(ValueError, match="data_is_sharded=True gives each rank its own data"):
        DataLoaderConfiguration(data_is_sharded=True, dispatch_batches=True)


@pytest.mark.parametrize("wrap", [lambda stream: stream, Wrapped], ids=["alone", "wrapped"])
def test_a_stream_that_knows_its_rank_is_divided_only_on_request(wrap: Any) -> None:
    loader = DataLoader(wrap(Files(1, 2)), batch_size=2)
    for dispatches in (None, False):
        options: dict[str, Any] = {"process_index": 1, "dispatch_batches": dispatches}
        with pytest.raises(
            ValueError, match="the Files has rank=1 and world_size=2, so it may already read only"
        ):
            prepare_data_loader(loader, num_processes=2, **options)
    for is_sharded, num_rows in ((True, ROWS // 2), (False, ROWS // 4)):
        prepared = prepare_data_loader(
            loader, num_processes=2, process_index=1, data_is_sharded=is_sharded, even_batches=False
        )
        assert sum(len(batch) for batch in prepared) == num_rows
    assert sum(len(batch) for batch in prepare_data_loader(loader)) == ROWS // 2  # a single process
    other = DataLoader(Files(1, 4), batch_size=2)  # not the job's ranks
    assert sum(len(batch) for batch in prepare_data_loader(other, num_processes=2, process_index=1)) == 4


def test_ranks_may_share_a_part_on_request() -> None:
    """All ranks of a machine read its part together; a single process reads all that it gets."""
    shared = [
        prepare_data_loader(
            DataLoader(split_dataset_by_node(_stream(4), 1, 2), batch_size=2),
            num_processes=2,
            process_index=rank,
            even_batches=False,
            data_is_sharded=False,
        )
        for rank in range(2)
    ]
    assert sorted(row for loader in shared for batch in loader for row in batch["row"].tolist()) == [
        row for row in range(ROWS) if row // 6 % 2 == 1
    ]
    alone = prepare_data_loader(DataLoader(split_dataset_by_node(_stream(4), 1, 2), batch_size=2))
    assert sum(len(batch["row"]) for batch in alone) == ROWS // 2


class Asking(IterableDataset[int]):
    """Reads the part of the rank that the environment names."""

    def __iter__(self) -> Iterator[int]:
        return (row for row in range(ROWS) if row % int(os.environ["WORLD_SIZE"]) == int(os.environ["RANK"]))


class Counting(IterableDataset[int]):
    """Reads everything, and has an attribute with the name of a number of ranks."""

    num_processes = 3

    def __iter__(self) -> Iterator[int]:
        return iter(range(ROWS * self.num_processes))


def test_a_stream_that_asks_for_its_rank_is_divided_only_on_request() -> None:
    loader = DataLoader(Asking(), batch_size=2)
    target: dict[str, Any] = {"num_processes": 2, "process_index": 1}
    with pytest.raises(ValueError, match="the Asking uses RANK and WORLD_SIZE, so it may already read only"):
        prepare_data_loader(loader, **target)
    for is_sharded in (True, False):
        prepare_data_loader(loader, **target, data_is_sharded=is_sharded, even_batches=False)
    prepare_data_loader(DataLoader(Counting(), batch_size=2), **target, dispatch_batches=False)
