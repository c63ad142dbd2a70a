"""Loaders that read with torchdata: they pass as its own loader, and each accepts the other's state."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from nblaunch import Accelerator, DataLoaderConfiguration, PartialState, context
from nblaunch.data_loader import (
    DataLoaderAdapter,
    DataLoaderDispatcher,
    DataLoaderShard,
    DataLoaderStateMixin,
    SkipDataLoader,
    prepare_data_loader,
    skip_first_batches,
)
from nblaunch.state import GradientState

# torchdata 0.11 calls functions that torch 2.13 deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")

KINDS: list[Any] = [SkipDataLoader, DataLoaderShard, DataLoaderDispatcher]


def _lists(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def _take(loader: Any, count: int) -> list[list[int]]:
    """Read ``count`` batches and then leave the epoch."""
    return [batch.tolist() for _, batch in zip(range(count), loader, strict=False)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_stateful", [False, True])
def test_loaders_pass_isinstance_of_the_base(kind: Any, is_stateful: bool) -> None:
    loader = kind(range(16), batch_size=4, use_stateful_dataloader=is_stateful)
    reads = StatefulDataLoader if is_stateful else DataLoader
    for one in (loader, pickle.loads(pickle.dumps(loader)), copy.copy(loader)):
        assert isinstance(one, kind)
        assert isinstance(one, DataLoaderAdapter)
        assert isinstance(one, DataLoaderStateMixin)
        assert isinstance(one, reads)
        assert isinstance(one, DataLoader)
        assert type(one.base_dataloader) is reads
        assert one.use_stateful_dataloader == is_stateful
        assert (len(one), one.batch_size, one.num_workers) == (4, 4, 0)
    if not is_stateful:
        with pytest.raises(AttributeError, match=r"^state_dict needs DataLoaderConfiguration"):
            loader.state_dict()
        with pytest.raises(AttributeError, match="load_state_dict needs DataLoaderConfiguration"):
            loader.load_state_dict({})


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_states_have_the_format_of_torchdata(kind: Any, num_workers: int) -> None:
    def options() -> dict[str, Any]:
        generator = torch.Generator().manual_seed(1)
        return {"batch_size": 4, "num_workers": num_workers, "generator": generator}

    theirs = StatefulDataLoader(range(32), **options())
    ours = kind(range(32), use_stateful_dataloader=True, **options())
    expected: list[list[int]] = []
    for batch in theirs:
        expected.append(batch.tolist())
        if len(expected) == 3:
            break
    assert _take(ours, 3) == expected
    state = theirs.state_dict()
    assert ours.state_dict() == state
    assert context.current().training.accumulation.loaders.innermost is None
    continued = kind(range(32), use_stateful_dataloader=True, **options())
    continued.load_state_dict(state)
    assert continued.state_dict() == state
    back = StatefulDataLoader(range(32), **options())
    back.load_state_dict(ours.state_dict())
    assert _lists(continued) == _lists(back) == [list(range(n, n + 4)) for n in range(12, 32, 4)]
    assert len(_lists(continued)) == 8


def test_a_loader_that_was_not_read_has_a_state() -> None:
    loader = DataLoaderShard(range(8), batch_size=4, use_stateful_dataloader=True)
    state = loader.state_dict()
    _take(loader, 1)
    loader.load_state_dict(state)
    assert _lists(loader) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    finished = loader.state_dict()
    assert finished["_iterator_finished"] is True
    loader.load_state_dict(finished)
    assert len(_lists(loader)) == 2


def test_a_loader_alone_makes_a_gradient_state() -> None:
    loader = prepare_data_loader(DataLoader(range(4), batch_size=2))
    PartialState._reset_state()
    assert GradientState._shared_state == {}
    for _ in loader:
        assert GradientState._shared_state != {}
        assert GradientState().in_dataloader


def test_a_stateful_loader_stays_stateful() -> None:
    given = StatefulDataLoader(range(8), batch_size=2, snapshot_every_n_steps=3)
    loader = Accelerator().prepare(given)
    assert isinstance(loader, StatefulDataLoader)
    assert loader.base_dataloader.snapshot_every_n_steps == 3
    assert _take(loader, 3) == [[0, 1], [2, 3], [4, 5]]
    resumed = prepare_data_loader(given)
    resumed.load_state_dict(loader.state_dict())
    assert _lists(resumed) == [[6, 7]]
    assert isinstance(skip_first_batches(given, 1), StatefulDataLoader)
    assert _lists(skip_first_batches(loader, 3)) == [[6, 7]]


def test_attributes_are_set_on_the_base_loader() -> None:
    loader = Accelerator().prepare(DataLoader(range(4), batch_size=2))
    loader.collate_fn = sum
    assert list(loader) == [1, 5]
    with pytest.raises(ValueError, match="drop_last"):
        loader.drop_last = True


def test_directly_made_shards_know_their_share() -> None:
    from nblaunch.data_loader import BatchSamplerShard

    order = BatchSampler(SequentialSampler(range(12)), 4, False)
    whole = DataLoaderShard(range(12), batch_sampler=order)
    split = DataLoaderShard(range(12), batch_sampler=BatchSamplerShard(order, 2, 1, split_batches=True))
    dealt = DataLoaderShard(range(12), batch_sampler=BatchSamplerShard(order, 2, 1), iteration=3)
    assert [loader.total_batch_size for loader in (whole, split, dealt)] == [4, 4, 8]
    assert (_lists(split), _lists(dealt)) == ([[2, 3], [6, 7], [10, 11]], [[4, 5, 6, 7], [0, 1, 2, 3]])
    assert dealt.iteration == 4
    assert dealt.get_sampler() is order.sampler


class _Own(DataLoaderStateMixin):
    """A user's loader, which only marks the beginning and the end of its epoch."""

    def __iter__(self) -> Any:
        self.begin()
        for number in range(3):
            self.end_of_dataloader = number == 2
            yield torch.tensor([number])
        self.end()


def test_custom_loaders_take_part_in_accumulation() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    synchronised = []
    for batch in _Own():
        with accelerator.accumulate():
            synchronised.append(accelerator.sync_gradients)
        assert accelerator.gather_for_metrics(batch).tolist() == batch.tolist()
    assert synchronised == [False, True, True]
    assert not accelerator.gradient_state.in_dataloader


def test_loader_states_are_loaded_on_the_cpu(tmp_path: Path) -> None:
    """They contain generators' states, which must be on the CPU."""

    def prepared() -> tuple[Accelerator, Any]:
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
        generator = torch.Generator().manual_seed(0)
        return accelerator, accelerator.prepare(DataLoader(range(6), 2, shuffle=True, generator=generator))

    accelerator, loader = prepared()
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 1:
            accelerator.save_state(tmp_path / "state")
    accelerator, loader = prepared()
    accelerator.load_state(tmp_path / "state", load_kwargs={"map_location": "meta"})
    assert _lists(loader) == seen[1:]
