"""Stateful loaders that are resumed several times in one epoch: each sample is seen once."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tqdm
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from nblaunch import Accelerator
from nblaunch.data_loader import skip_first_batches
from nblaunch.training.options import DataLoaderConfiguration
from nblaunch.utils import set_seed
from tests.thorough import thorough
from tests.training import ranks

ROWS = 24

# torchdata 0.11 calls functions that torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


class Plain(IterableDataset[int]):
    """A stream without a position."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        return iter(range(ROWS)) if info is None else iter(range(info.id, ROWS, info.num_workers))


class Stateful(IterableDataset[int]):
    """A stream with a position."""

    num_rows = ROWS

    def __init__(self) -> None:
        self.read = 0

    def __iter__(self) -> Any:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        while first + self.read * step < self.num_rows:
            self.read += 1
            yield first + (self.read - 1) * step
        self.read = 0

    def state_dict(self) -> dict[str, int]:
        return {"read": self.read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.read = state["read"]


class Odd(Stateful):
    """A stream with a position, and with one more row than a whole number of rounds."""

    num_rows = ROWS + 1


class Shuffled(Plain):
    """A stream that draws its order from its own generator."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __iter__(self) -> Any:
        return iter(torch.randperm(ROWS, generator=self.generator).tolist())


def _buffered() -> Any:
    """Return a stream that shuffles in a buffer, whose rows are not in its state."""
    import datasets  # imported here because it takes seconds

    whole = datasets.Dataset.from_dict({"row": list(range(ROWS))}).to_iterable_dataset(num_shards=4)
    return whole.shuffle(seed=3, buffer_size=7).with_format("torch")


DATA: dict[str, Any] = {
    "plain": Plain,
    "stateful": Stateful,
    "odd": Odd,
    "buffered": _buffered,
    "shuffled": Shuffled,
    "indexed": lambda: TensorDataset(torch.arange(ROWS)),
}


def _part(
    kind: str, dispatch: bool, num_workers: int, folder: str, is_resumed: bool, steps: int, state: Any
) -> tuple[list[int], Any, int]:
    """Read ``steps`` batches, from a state or a checkpoint; return rows, state, and the rows that all ranks have
    read.
    """
    config = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=dispatch)
    accelerator = Accelerator(dataloader_config=config)
    torch.manual_seed(3)
    warnings.filterwarnings("ignore", "the stream shuffles in a buffer")
    given = DataLoader(DATA[kind](), batch_size=2, num_workers=num_workers, shuffle=kind == "indexed" or None)
    loader = accelerator.prepare(given)
    if folder and is_resumed:
        accelerator.load_state(folder)
    elif is_resumed:
        loader.load_state_dict(state)
    rows: list[int] = []
    for number, batch in enumerate(loader, 1):
        rows += (
            batch[0] if isinstance(batch, list) else batch["row"] if isinstance(batch, dict) else batch
        ).tolist()
        if number == steps:
            if folder:
                accelerator.save_state(folder)
            return rows, loader.state_dict(), loader.position.samples
    return rows, None, 0


def _seen(
    kind: str, sizes: list[int], steps: list[int], dispatch: bool, num_workers: int, folder: str = ""
) -> tuple[Counter[int], list[int]]:
    """Return how often each row was seen, and the number of rows that all ranks had read at each state."""
    seen: Counter[int] = Counter()
    read: list[int] = []
    states: list[Any] = [None]
    for number, size in enumerate(sizes):
        state = states[0]  # if ranks share a stream, all ranks' states are equal
        parts = ranks.run(_part, size, kind, dispatch, num_workers, folder, number > 0, steps[number], state)
        for rows, _, _ in parts:
            seen.update(rows)
        states = [state for _, state, _ in parts]
        read.append(parts[0][2])
    return seen, read


@pytest.mark.parametrize(
    ("kind", "dispatch"),
    [
        *((kind, False) for kind in ("plain", "shuffled", "indexed")),
        ("plain", True),
        *(thorough(kind, True) for kind in ("shuffled", "indexed")),
    ],
)
def test_each_row_is_seen_once_however_often_a_loader_is_resumed(
    kind: str, dispatch: bool, tmp_path: Path
) -> None:
    for folder in ("", str(tmp_path / "state")):
        seen, read = _seen(kind, [2, 2, 2, 2], [2, 1, 1, -1], dispatch, 0, folder)
        assert seen == Counter(range(ROWS)), folder
        assert read == [8, 12, 16, 0], "the position of all ranks counts from the start of the epoch"


@pytest.mark.parametrize("kind", ["plain", "stateful"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_lone_process_sees_each_row_once(kind: str, num_workers: int) -> None:
    seen, read = _seen(kind, [1, 1, 1, 1], [3, 2, 1, -1], False, num_workers)
    assert seen == Counter(range(ROWS))
    assert read == [6, 10, 12, 0]


@pytest.mark.parametrize("dispatch", [False, True])
def test_processes_that_read_for_ranks_are_resumed_too(dispatch: bool, tmp_path: Path) -> None:
    seen, _ = _seen("plain", [2, 2, 2], [2, 1, -1], dispatch, 2, str(tmp_path / "state"))
    assert seen == Counter(range(ROWS))


@pytest.mark.parametrize("num_workers", [0, 2])
def test_rows_in_the_buffer_of_a_stream_are_not_lost(
    num_workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # `datasets` would start a permanent thread
    for folder in ("", str(tmp_path / "state")):
        seen, _ = _seen("buffered", [2, 2, 2], [2, 1, -1], True, num_workers, folder)
        assert seen == Counter(range(ROWS)), folder
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    loaders = [accelerator.prepare(DataLoader(_buffered(), batch_size=2)) for _ in range(2)]
    read = iter(loaders[0])
    first = [next(read)["row"].tolist() for _ in range(3)]
    with pytest.warns(
        UserWarning, match="a buffer of 7 rows, which its state does not include, so the loader reads"
    ):
        loaders[1].load_state_dict(loaders[0].state_dict())
    rest = [batch["row"].tolist() for batch in loaders[1]]
    assert first + rest == first + [batch["row"].tolist() for batch in read]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_same_row_completes_the_last_round_of_a_resumed_stream(num_workers: int, tmp_path: Path) -> None:
    """The stream continues from its own position, so it does not return its first row again."""
    for folder in ("", str(tmp_path / "state")):
        seen, _ = _seen("odd", [2, 2, 2], [2, 1, -1], True, num_workers, folder)
        assert seen == Counter([*range(ROWS + 1), 0]), folder


@pytest.mark.parametrize("kind", ["plain", "shuffled", "indexed"])
def test_other_numbers_of_ranks_resume_twice(kind: str, tmp_path: Path) -> None:
    seen, _ = _seen(kind, [2, 2, 1, 1], [2, 2, 1, -1], False, 0, str(tmp_path / "state"))
    assert seen == Counter(range(ROWS))


def test_torchdata_loads_the_states() -> None:
    """A loader for the rest of a stream, torchdata's own loader and a prepared one take them in any order."""

    def take(loader: Any, steps: int) -> tuple[list[int], Any]:
        rows: list[int] = []
        for number, batch in enumerate(loader, 1):
            rows += batch.tolist()
            if number == steps:
                break
        return rows, loader.state_dict()

    seen, state = take(skip_first_batches(StatefulDataLoader(Plain(), batch_size=2), 1), 2)
    for make in (
        lambda: skip_first_batches(StatefulDataLoader(Plain(), batch_size=2), 1),
        lambda: Accelerator().prepare(StatefulDataLoader(Plain(), batch_size=2)),
        lambda: Accelerator().prepare(StatefulDataLoader(Plain(), batch_size=2)),
        lambda: StatefulDataLoader(Plain(), batch_size=2),
    ):
        loader = make()
        loader.load_state_dict(state)
        rows, state = take(loader, 2)
        seen += rows
    assert seen == list(range(2, 22))


class Drawing(Sampler[int]):
    """A user's sampler that draws the order from a global generator."""

    def __init__(self, draw: Callable[[], list[int]]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return ROWS

    def __iter__(self) -> Any:
        return iter(self.draw())


class DrawingStream(Plain):
    """A stream that draws the order from a global generator."""

    def __init__(self, draw: Callable[[], list[int]]) -> None:
        self.draw = draw

    def __iter__(self) -> Any:
        info = get_worker_info()
        return iter(self.draw() if info is None else self.draw()[info.id :: info.num_workers])


GLOBAL = {
    "torch": lambda: torch.randperm(ROWS).tolist(),
    "random": lambda: random.sample(range(ROWS), ROWS),
    "numpy": lambda: np.random.permutation(ROWS).tolist(),
}


def _train_in_a_drawn_order(
    folder: Path, source: str, options: dict[str, Any], is_resumed: bool
) -> list[tuple[list[int], float]]:
    """Read two epochs, drawing a number in every step; save after 3 batches, or resume from there."""
    set_seed(2 if is_resumed else 1)
    accelerator = Accelerator(
        dataloader_config=DataLoaderConfiguration(use_stateful_dataloader="stateful" in options)
    )
    drawing, num_workers = GLOBAL[source], 1 if "worker" in options else 0
    data: Any = DrawingStream(drawing) if "stream" in options else range(ROWS)
    sampler = None if "stream" in options else Drawing(drawing)
    loader = accelerator.prepare(DataLoader(data, batch_size=2, sampler=sampler, num_workers=num_workers))
    rest = loader
    if is_resumed:
        accelerator.load_state(folder)
        rest = accelerator.skip_first_batches(loader)
    seen = []
    for batch in chain(rest, loader):
        seen.append((batch.tolist(), float(torch.rand(())) + random.random() + np.random.rand()))
        if len(seen) == 3 and not is_resumed:
            accelerator.save_state(folder)
    return seen


@pytest.mark.parametrize("source", GLOBAL)
@pytest.mark.parametrize("options", [(), ("stream",), ("stream", "worker"), ("stateful",)], ids=" ".join)
def test_an_order_from_global_generators_is_continued(
    tmp_path: Path, source: str, options: tuple[str, ...]
) -> None:
    whole = _train_in_a_drawn_order(tmp_path / "state", source, options, is_resumed=False)
    assert _train_in_a_drawn_order(tmp_path / "state", source, options, is_resumed=True) == whole[3:]


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_continue_an_order_from_global_generators(tmp_path: Path, world_size: int) -> None:
    whole, rest = (
        ranks.run(_train_in_a_drawn_order, world_size, tmp_path / "state", "torch", (), is_resumed)
        for is_resumed in (False, True)
    )
    assert rest == [seen[3:] for seen in whole]


class Shuffled(IterableDataset[int]):
    """A stream whose order comes from its own generator."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Any:
        return iter(torch.randperm(ROWS, generator=self.generator).tolist())


def _read_shuffled(folder: Path, options: dict[str, Any], seed: int, num_before: int | None) -> list[Any]:
    """Read two epochs and save after ``num_before`` batches; if None, resume and read the rest of both."""
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
    loader = accelerator.prepare(DataLoader(Shuffled(seed), batch_size=2))
    rest = loader
    if num_before is None:
        accelerator.load_state(folder)
        rest = accelerator.skip_first_batches(loader)
    seen = []
    for batch in rest:
        seen.append(batch.tolist())
        if len(seen) == num_before:
            accelerator.save_state(folder)
    return [seen, [batch.tolist() for batch in loader]]


@pytest.mark.parametrize(
    "options", [{}, {"dispatch_batches": False}, {"use_stateful_dataloader": True}], ids=str
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_stream_with_a_generator_continues_in_its_order(
    tmp_path: Path, options: dict[str, Any], world_size: int
) -> None:
    whole = ranks.run(_read_shuffled, world_size, tmp_path / "state", options, 1, 3)
    rest = ranks.run(_read_shuffled, world_size, tmp_path / "state", options, 2, None)
    for (first, second), resumed in zip(whole, rest, strict=True):
        assert resumed == [first[3:], second]
