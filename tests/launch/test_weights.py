"""Weights on their way back: all of them or none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nblaunch.launch.weights import load_back, module_positions


def ones_like(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.ones_like(tensor) for name, tensor in module.state_dict().items()}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"1.weight": torch.ones(5, 2)}, "1.weight is (5, 2) there and (3, 2) here"),
        ({"2.weight": torch.ones(1)}, "2.weight is only there"),
        ({"1.bias": None}, "1.bias is only here"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(change: dict[str, torch.Tensor | None], reason: str) -> None:
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = {name: tensor for name, tensor in (ones_like(model) | change).items() if tensor is not None}
    (line,), loaded = load_back((None, model), {1: state}, {})
    assert "args[1] (Sequential)" in line
    assert "not loaded" in line
    assert loaded == set()
    assert reason in line
    assert "job.weights()[1]" in line
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_what_could_not_travel_is_named_and_the_rest_is_loaded() -> None:
    model = net()
    state = ones_like(model)
    del state["1.bias"]
    (line,), loaded = load_back((model,), {0: state}, {0: "args[0].state_dict()['1.bias'] (TypeError: no)"})
    assert "are back" in line
    assert loaded == {0}
    assert "['1.bias'] (TypeError: no)" in line
    assert model[0].weight.unique().tolist() == [1.0]
    (line,), loaded = load_back((model,), {}, {0: "OSError: gone"})
    assert loaded == set()
    assert "OSError: gone" in line


def test_a_lazy_module_is_filled() -> None:
    lazy = nn.LazyLinear(3)
    (line,), _ = load_back((lazy,), {0: {"weight": torch.ones(3, 4), "bias": torch.ones(3)}}, {})
    assert "are back" in line
    assert lazy.weight.shape == (3, 4)


def test_only_modules_with_weights_of_their_own_are_wanted() -> None:
    args = (1, net(), nn.Linear(2, 2, device="meta"), [net()], nn.Linear(1, 1))
    assert module_positions(args) == (1, 4)
