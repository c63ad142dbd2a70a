"""Registered objects in checkpoints: shards, states that differ between ranks, other numbers of ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nblaunch import Accelerator, FullyShardedDataParallelPlugin
from nblaunch.errors import CheckpointError
from nblaunch.training.checkpoints import files
from nblaunch.training.collectives import dtensor
from tests.training import ranks

DECAY = 0.75
STEPS = 3


def _network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def _train(model: nn.Module, optimizer: Any, backward: Callable[[torch.Tensor], None], after: Any) -> None:
    """Train on the same batch everywhere, so that averaged gradients equal one process's."""
    inputs = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward(model(inputs).square().sum())
        optimizer.step()
        after(model)


@dataclass(frozen=True)
class Held:
    """A container that isn't a list, tuple or dict."""

    number: int
    weight: torch.Tensor


class Average:
    """An average of weights, in any form that libraries use."""

    def __init__(self) -> None:
        self.num_updates = 0
        self.shadow: list[torch.Tensor] = []
        self.nested: dict[str, Any] = {"moments": [], "rows": ()}

    def update(self, model: nn.Module) -> None:
        weights = [one.detach() for one in model.parameters()]
        if not self.shadow:  # lazily, so an object that loads the state does not have it yet
            self.shadow = [one.clone() for one in weights]
            self.nested["moments"] = [{"square": one.square()} for one in weights]
        for own, weight in zip(self.shadow, weights, strict=True):
            own.mul_(DECAY).add_(weight, alpha=1 - DECAY)
        self.nested["held"] = Held(self.num_updates, weights[0].square())
        self.nested["rows"] = tuple(one.sum(dim=-1) for one in self.shadow if one.ndim > 1)
        self.num_updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_updates": self.num_updates, "shadow": self.shadow, "nested": self.nested}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_updates, self.shadow = state["num_updates"], list(state["shadow"])
        self.nested = state["nested"]


def _full(state: Any) -> Any:
    """Return a state with full tensors, converted to lists of numbers."""
    whole = dtensor.gather(state, True)

    def listed(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.tolist()
        if isinstance(value, dict):
            return {key: listed(item) for key, item in value.items()}
        if isinstance(value, Held):
            return {"number": value.number, "weight": listed(value.weight)}
        return [listed(item) for item in value] if isinstance(value, (list, tuple)) else value

    return listed(whole)


def _sharded(folder: str, is_saving: bool, kind: str, has_averaged: bool) -> Any:
    """Save an average of sharded weights and a second optimizer, or load both; return their full states."""
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(state_dict_type=kind))
    module = _network()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.01))
    average, second = Average(), torch.optim.Adam(model.parameters(), lr=0.0)
    if has_averaged:
        average.update(model)
    accelerator.register_for_checkpointing(average, second)
    if not is_saving:
        accelerator.load_state(folder)
        before = _full(average.state_dict())
        average.update(model)  # with shards for this number of ranks
    else:
        _train(model, optimizer, accelerator.backward, lambda one: (average.update(one), second.step()))
        accelerator.save_state(folder)
        before = _full(average.state_dict())
    return before, _full(second.state_dict())


def _of_one_process() -> Any:
    model, average = _network(), Average()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    second = torch.optim.Adam(model.parameters(), lr=0.0)
    backward: Any = torch.Tensor.backward
    _train(model, optimizer, backward, lambda one: (average.update(one), second.step()))
    return _full(average.state_dict()), _full(second.state_dict())


def _assert_alike(some: Any, others: Any) -> None:
    if isinstance(some, dict):
        assert some.keys() == others.keys()
        for key, value in some.items():
            _assert_alike(value, others[key])
    elif isinstance(some, list) and some and isinstance(some[0], (list, dict)):
        assert len(some) == len(others)
        for value, other in zip(some, others, strict=True):
            _assert_alike(value, other)
    elif isinstance(some, (list, float)):
        assert some == pytest.approx(others, rel=1e-12)
    else:
        assert some == others


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [("SHARDED_STATE_DICT", 2, (1, 2, 4)), ("FULL_STATE_DICT", 2, (1,)), ("SHARDED_STATE_DICT", 1, (2,))],
)
def test_any_number_of_ranks_loads_registered_shards(
    tmp_path: Path, kind: str, before: int, after: tuple[int, ...]
) -> None:
    expected = list(_of_one_process())
    for states in ranks.run(_sharded, before, str(tmp_path), True, kind, False):
        _assert_alike(list(states), expected)
    for number in after:
        # One rank saves no shards, so the loading object must already have the average.
        for states in ranks.run(_sharded, number, str(tmp_path), False, kind, before == 1):
            _assert_alike(list(states), expected)


def _diffusers(folder: str) -> Any:
    """Return the averages of one process, of sharded weights, and of an average that was loaded over zeros."""
    from diffusers.training_utils import EMAModel

    alone = _network()
    expected = EMAModel(alone.parameters(), decay=DECAY)
    backward: Any = torch.Tensor.backward
    optimizer: Any = torch.optim.SGD(alone.parameters(), lr=0.01)
    _train(alone, optimizer, backward, lambda one: expected.step(one.parameters()))

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    module = _network()
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.01))
    average = EMAModel(model.parameters(), decay=DECAY)
    accelerator.register_for_checkpointing(average)
    _train(model, optimizer, accelerator.backward, lambda one: average.step(one.parameters()))
    accelerator.save_state(folder)
    before = _full(average.shadow_params)
    for weight in average.shadow_params:
        dtensor.local(weight).zero_()
    accelerator.load_state(folder)
    return _full(expected.shadow_params), before, _full(average.shadow_params)


@pytest.mark.thorough
def test_diffusers_averages_are_saved_whole(tmp_path: Path) -> None:
    for expected, saved, loaded in ranks.run(_diffusers, 2, str(tmp_path / "state")):
        _assert_alike(saved, expected)
        assert loaded == saved


class Holder:
    """An object with a state."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        if isinstance(self.state, Exception):
            raise self.state
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def _per_rank(folder: str, per_rank: bool | None, is_saving: bool, kept: str) -> Any:
    """Save or load a separate state per rank; different orders of sets, and equal objects, must not count as a
    difference.
    """
    accelerator = Accelerator()
    rank = accelerator.process_index
    own = rank if kept == "own" else 7
    words = [f"word{index}" for index in range(9)]
    common = {"names": {"".join(word) for word in (words if rank else reversed(words))}, "value": own}
    holder = Holder({"common": common, "samples": [torch.full((2,), float(own))]} if is_saving else None)
    normalised = nn.BatchNorm1d(2)
    if is_saving:
        normalised(torch.randn(8, 2) + rank)
    accelerator.register_for_checkpointing(holder, per_rank=per_rank)
    accelerator.register_for_checkpointing(normalised)
    if is_saving:
        accelerator.save_state(folder)
        return sorted(path.name for path in Path(folder).glob("custom*"))
    try:
        accelerator.load_state(folder)
    except CheckpointError as error:
        return str(error)
    return holder.state["common"]["value"], holder.state["samples"][0].tolist()


def test_differing_states_stay_with_their_ranks(tmp_path: Path) -> None:
    folder = str(tmp_path / "state")
    first, second, own = "custom_checkpoint_0.pkl", "custom_checkpoint_1.pkl", "custom_checkpoint_0_rank1.pkl"
    assert ranks.run(_per_rank, 2, folder, None, True, "own")[0] == [first, own, second]
    assert ranks.run(_per_rank, 2, folder, None, False, "own") == [(0, [0.0, 0.0]), (1, [1.0, 1.0])]
    for message in ranks.run(_per_rank, 3, folder, None, False, "own"):
        assert "a Holder, had a different state on rank 1 than on rank 0 when 2 processes saved it" in message
        assert "per_rank=False" in message
    assert ranks.run(_per_rank, 3, folder, False, False, "own") == [(0, [0.0, 0.0])] * 3

    assert ranks.run(_per_rank, 2, folder, None, True, "common")[0] == [
        first,
        second,
    ]  # the other rank has left
    assert ranks.run(_per_rank, 3, folder, None, False, "common") == [(7, [7.0, 7.0])] * 3
    assert ranks.run(_per_rank, 2, folder, True, True, "common")[0] == [first, own, second]


def _rejected(folder: str, name: str) -> str:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    model = accelerator.prepare(_network())
    shards = [one.detach() for one in model.parameters()]
    rank = accelerator.process_index
    states = {
        "hidden": SimpleNamespace(shards=shards),
        "other": shards[: 1 + rank],
        "raises": OSError("no such thing") if rank else {},
    }
    accelerator.register_for_checkpointing(Holder(states[name]))
    with pytest.raises((CheckpointError, OSError)) as caught:
        accelerator.save_state(f"{folder}/{name}")
    assert not Path(folder, name).exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("hidden", "can't be gathered"),
        ("other", "on rank 1 and rank 0 hold shards of different tensors"),
        ("raises", "no such thing"),
    ],
)
def test_unsavable_states_are_rejected_on_all_ranks(tmp_path: Path, name: str, message: str) -> None:
    for text in ranks.run(_rejected, 2, str(tmp_path), name):
        assert message in text


def _load_of_rank_0_alone(folder: str) -> None:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    model = accelerator.prepare(_network())
    shards = [one.detach() for one in model.parameters()]
    accelerator.register_for_checkpointing(Holder(copy.copy(shards)))
    accelerator.save_state(folder)
    if accelerator.is_main_process:
        torch.save(shards, Path(folder) / files.custom(0))
        (Path(folder) / files.MANIFEST).unlink()
    accelerator.wait_for_everyone()
    with pytest.raises(CheckpointError, match="holds only the shards of rank 0"):
        accelerator.load_state(folder)


def test_saving_only_rank_0s_shards_is_rejected(tmp_path: Path) -> None:
    ranks.run(_load_of_rank_0_alone, 2, str(tmp_path / "state"))
