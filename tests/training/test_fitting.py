"""``load_state`` changes nothing if any part of the checkpoint does not fit."""

from __future__ import annotations

import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nblaunch import Accelerator
from nblaunch.errors import CheckpointError
from nblaunch.training.checkpoints.load_weights import check_weights, load_weights
from nblaunch.training.checkpoints.model_files import read_weights, write_weights


class _Registered:
    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def _sgd(*groups: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": group} for group in groups], lr=0.1, momentum=0.9)


def _changed_second_model(first: nn.Linear, second: nn.Linear) -> tuple[Any, ...]:
    return first, nn.Linear(2, 3), _sgd([*first.parameters()])


def _changed_groups(first: nn.Linear, second: nn.Linear) -> tuple[Any, ...]:
    return first, second, _sgd([first.weight], [first.bias])


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            _changed_second_model,
            r"model_1\.(safetensors|bin) does not fit the model. size mismatch for weight: \(2, 2\)",
        ),
        (_changed_groups, r"optimizer\.bin does not fit the optimizer: .*\[2\].*\[1, 1\]"),
    ],
)
def test_nothing_is_changed_if_a_part_does_not_fit(
    tmp_path: Path, safe: bool, change: Callable[..., Any], message: str
) -> None:
    accelerator = Accelerator()
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    accelerator.prepare(first, second, _sgd([*first.parameters()]))
    accelerator.save_state(tmp_path / "state", safe_serialization=safe)
    accelerator.free_memory()
    kept = nn.Linear(2, 2)
    before = {name: value.clone() for name, value in kept.state_dict().items()}
    accelerator.prepare(*change(kept, nn.Linear(2, 2)))
    with pytest.raises(CheckpointError, match=message):
        accelerator.load_state(tmp_path / "state")
    assert all(torch.equal(value, before[name]) for name, value in kept.state_dict().items())


def test_untrusted_registered_objects_change_nothing(tmp_path: Path) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(2, 2))
    first, second = _Registered(1), _Registered(string.Template("executes code"))
    accelerator.register_for_checkpointing(first, second)
    accelerator.save_state(tmp_path / "state")
    first.value = 2
    before = model.weight.detach().clone()
    with torch.no_grad():
        model.weight += 1
    with pytest.raises(CheckpointError, match="untrusted classes"):
        accelerator.load_state(tmp_path / "state")
    assert torch.equal(model.weight, before + 1)
    assert first.value == 2


class _Renaming(nn.Module):
    """A module that reads weights of an older version of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.norm = nn.BatchNorm1d(2)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        if f"{prefix}kernel" in state:
            state[f"{prefix}weight"] = state.pop(f"{prefix}kernel")
        super()._load_from_state_dict(state, prefix, *args)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(2, 2), nn.Linear(2, 2)
        self.other.weight = self.one.weight


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "kind", ["as saved", "older", "tied", "module.", "missing", "unexpected", "mismatch"]
)
def test_the_check_agrees_with_loading(tmp_path: Path, safe: bool, strict: bool, kind: str) -> None:
    model: nn.Module = nn.Sequential(_Tied(), _Renaming(), nn.BatchNorm1d(2))
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    if kind == "older":
        weights["1.kernel"] = weights.pop("1.weight")
        del weights["2.num_batches_tracked"]  # as in older versions of torch
    elif kind == "tied":
        del weights["0.other.weight"]
    elif kind == "module.":
        weights = {f"module.{name}": value for name, value in weights.items()}
    elif kind == "missing":
        del weights["0.one.bias"]
    elif kind == "unexpected":
        weights["3.weight"] = torch.zeros(1)
    elif kind == "mismatch":
        weights["0.one.bias"] = torch.zeros(3)
    path = tmp_path / ("model.safetensors" if safe else "pytorch_model.bin")
    write_weights(weights, path, safe)

    def problem(work: Callable[[], None]) -> bool:
        try:
            work()
        except CheckpointError as error:
            return str(path) in str(error)
        return False

    expected = problem(lambda: load_weights(model, read_weights(path), path, strict))
    assert problem(lambda: check_weights(model, path, strict)) == expected
    assert expected == (kind == "mismatch" or (strict and kind in ("missing", "unexpected")))


class _Remembering(nn.Linear):
    """A module with an additional tensor that grows."""

    def __init__(self, size: int) -> None:
        super().__init__(1, 1)
        self.seen = torch.ones(size)

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def test_an_extra_state_may_have_another_size(tmp_path: Path) -> None:
    path, model = tmp_path / "model.safetensors", _Remembering(0)
    write_weights(_Remembering(3).state_dict(), path, True)
    check_weights(model, path, True)
    load_weights(model, read_weights(path), path, True)
    assert model.seen.tolist() == [1.0, 1.0, 1.0]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    for name in ("model.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"no weights")
        with pytest.raises(CheckpointError, match=f"{name} (can.t be read; is it|is) damaged"):
            check_weights(nn.Linear(1, 1), tmp_path / name, True)
