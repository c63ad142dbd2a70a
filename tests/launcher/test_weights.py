"""Weights are loaded back completely, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from nblaunch.launcher import weights
from nblaunch.launcher.weights import assembled, load_into, merge_ranks
from nblaunch.weights import TensorShard
from nblaunch.wire.argument_paths import ArgPath
from nblaunch.wire.originals import Unchanged
from tests.training.quantised_model import Adapted


def ones_like(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.ones_like(tensor) for name, tensor in module.state_dict().items()}


def load_back(
    modules: Mapping[Any, nn.Module], states: Mapping[Any, Any], lost: Mapping[Any, str]
) -> tuple[set[ArgPath], list[str], list[str]]:
    """Load weights back; return the loaded paths, the lines and the warnings."""
    paths, notes = weights.load_back(modules, states, lost)
    lines = [note.text for note in notes if note.kind == "note"]
    return paths, lines, [note.text for note in notes if note.kind == "warning"]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"1.weight": torch.ones(5, 2)}, "1.weight is (5, 2) in the worker but (3, 2) in the kernel"),
        ({"2.weight": torch.ones(1)}, "2.weight exists only in the worker"),
        ({"1.bias": None}, "1.bias exists only in the kernel"),
        ({f"{i}.new": torch.ones(1) for i in range(9)}, "2.new exists only in the worker and 6 more"),
    ],
)
def test_weights_that_do_not_fit_change_nothing(change: dict[str, torch.Tensor | None], reason: str) -> None:
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = {name: tensor for name, tensor in (ones_like(model) | change).items() if tensor is not None}
    paths, lines, (line,) = load_back({1: model}, {1: state}, {})
    assert (paths, lines) == (set(), [])
    assert "args[1] (Sequential)" in line
    assert "not loaded" in line
    assert reason in line
    assert "weights()[1]" in line
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_lost_weights_are_named_and_others_loaded() -> None:
    model = net()
    state = ones_like(model)
    del state["1.bias"]
    lost = {0: "args[0].state_dict()['1.bias'] (TypeError: no)"}
    paths, (line,), (warning,) = load_back({0: model}, {0: state}, lost)
    assert "copied trained weights" in line
    assert paths == {0}
    assert warning.startswith(
        f"some trained weights of args[0] (Sequential) could not be copied back: {lost[0]}"
    )
    assert model[0].weight.unique().tolist() == [1.0]
    paths, _lines, warnings = load_back({0: model}, {}, {0: "OSError: gone"})
    (line,) = warnings
    assert not paths
    assert line.startswith("trained weights of args[0] (Sequential) could not be copied back: OSError: gone")


def test_unknown_parts_count_as_changed() -> None:
    modules = {0: net(), 1: net()}
    states = {path: {"0.bias": Unchanged((2,))} for path in modules}
    states[1] = {name: Unchanged(tuple(value.shape)) for name, value in modules[1].state_dict().items()}
    paths, lines, (warning,) = load_back(modules, states, {0: "no"})
    assert paths == {0, 1}
    assert lines == ["the weights of args[1] (Sequential) were not changed by the workers"]
    assert warning.startswith("some trained weights of args[0] (Sequential) could not be copied back: no")


def test_a_lazy_module_is_filled() -> None:
    lazy = nn.LazyLinear(3)
    _, (line,), _ = load_back({0: lazy}, {0: {"weight": torch.ones(3, 4), "bias": torch.ones(3)}}, {})
    assert "copied trained weights" in line
    assert lazy.weight.shape == (3, 4)


def test_returned_weights_are_reported_in_one_line() -> None:
    nets = [net() for _ in range(5)]
    modules = {0: net(), "args[1]['a']": nets[0]}
    states = {path: ones_like(module) for path, module in modules.items()}
    _paths, (line,), _warnings = load_back(modules, states, {})
    assert line == "copied trained weights into args[0] (Sequential), args[1]['a'] (Sequential): 120 B"
    modules = {f"args[0][{i}]": module for i, module in enumerate(nets)}
    _, (line,), _ = load_back(modules, {path: ones_like(module) for path, module in modules.items()}, {})
    assert "args[0][2] (Sequential) and 2 more: 300 B" in line
    assert all(module[0].bias.tolist() == [1.0, 1.0] for module in nets)


def test_one_mismatch_does_not_block_others() -> None:
    modules = {"args[0][0]": net(), "args[0][1]": net()}
    states = {path: ones_like(module) for path, module in modules.items()}
    del states["args[0][0]"]["1.bias"]
    paths, lines, warnings = load_back(modules, states, {})
    assert paths == {"args[0][1]"}
    assert len(lines) == 1
    assert "weights()['args[0][0]']" in warnings[0]


def in_shards(state: dict[str, torch.Tensor], count: int) -> list[dict[int, dict[str, object]]]:
    """Return the shards that ``count`` ranks send: each holds some rows of every weight, and rank 0 the biases."""
    states: list[dict[int, dict[str, object]]] = [{0: {}} for _ in range(count)]
    for name, tensor in state.items():
        if name.endswith("bias"):
            states[0][0][name] = tensor
            continue
        start = 0
        for rank, rows in enumerate(tensor.tensor_split(count)):
            states[rank][0][name] = TensorShard(tuple(tensor.shape), (start, 0), rows)
            start += len(rows)
    return states


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_shards_are_loaded_as_full_tensors(device: str) -> None:
    state = {name: torch.randn(tensor.shape) for name, tensor in net().state_dict().items()}
    model = net().to(device)
    model[1].requires_grad_(False)
    paths, lines, _warnings = load_back({0: model}, merge_ranks(in_shards(state, 4)), {})
    assert paths == {0}
    (line,) = lines
    assert "copied trained weights" in line
    assert "60 B" in line
    torch.testing.assert_close(dict(model.state_dict()), state)
    assert [p.requires_grad for p in model.parameters()] == [True, True, False, False]


def test_tied_weights_of_a_module_without_memory_stay_tied() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to("meta")
    model[1].weight = model[0].weight
    state = {name: torch.randn(tensor.shape) for name, tensor in model.state_dict().items()}
    state["1.weight"] = state["0.weight"]
    assert load_back({0: model}, merge_ranks(in_shards(state, 2)), {})[0] == {0}
    assert model[1].weight is model[0].weight
    torch.testing.assert_close(model[0].weight.data, state["0.weight"])


def test_incomplete_shards_change_nothing() -> None:
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    states = in_shards(ones_like(model), 2)
    paths, _lines, warnings = load_back({0: model}, merge_ranks(states[:1]), {})
    assert not paths
    (line,) = warnings
    assert "2 elements of 0.weight are on other machines" in line
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_unloaded_weights_are_available_whole() -> None:
    state = {"weight": torch.randn(5, 2)}
    whole = assembled(merge_ranks(in_shards(state, 3))[0], nn.Linear(2, 5))
    torch.testing.assert_close(whole, state)


class Versioned(nn.Linear):
    """Rejects a state dict without its version, like some models of torchvision."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version") != 2:
            raise ValueError(f"version {local_metadata.get('version')}")
        super()._load_from_state_dict(state, prefix, local_metadata, *rest)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_modules_learn_the_version_of_what_they_load(device: str) -> None:
    model = Versioned(2, 2).to(device)
    state = {name: torch.ones(tensor.shape) for name, tensor in model.state_dict().items()}
    paths, _lines, warnings = load_back({0: model}, {0: state}, {})
    assert (paths, warnings) == ({0}, [])
    assert model.weight.unique().tolist() == [1.0]
    Versioned(2, 2).load_state_dict(assembled(state, model))


def observed_net() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3))
    model.qconfig = torch.ao.quantization.get_default_qat_qconfig("x86")
    return torch.ao.quantization.prepare_qat(model.train())


@pytest.mark.filterwarnings("ignore")  # torch recommends torchao instead
def test_modules_that_reshape_loaded_tensors_load_them_themselves() -> None:
    model, trained = observed_net(), observed_net()
    trained(torch.randn(5, 2))  # observers of channels begin without channels
    state = dict(trained.state_dict())
    weight = state["0.weight"]
    sent: dict[str, Any] = {**state, "0.weight": TensorShard((2, 2), (0, 0), weight)}
    paths, _lines, warnings = load_back({0: model}, merge_ranks([{0: sent}]), {})
    assert (paths, warnings) == ({0}, [])
    torch.testing.assert_close(dict(model.state_dict()), state)
    del state["0.bias"]
    paths, _lines, (line,) = load_back({0: model}, {0: state}, {})
    assert not paths
    assert "0.bias exists only in the kernel" in line


class AllOrNothing(nn.Module):
    """A module that needs all of its tensors whenever it loads one."""

    def __init__(self) -> None:
        super().__init__()
        self.kept, self.other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

    def _load_from_state_dict(self, state: Any, prefix: str, *rest: Any) -> None:
        self.kept.data = state[f"{prefix}kept"].clone()
        self.other.data = state[f"{prefix}other"].clone()


def test_self_loading_modules_get_all_tensors() -> None:
    model = nn.Sequential(AllOrNothing())
    state = {"0.kept": Unchanged((2,)), "0.other": torch.ones(2)}
    paths, _lines, warnings = load_back({0: model}, {0: state}, {})
    assert (paths, warnings) == ({0}, [])
    assert (model[0].kept.tolist(), model[0].other.tolist()) == ([0.0, 0.0], [1.0, 1.0])


class Remembering(nn.Linear):
    """A module with an extra state of any form in addition to its weights."""

    def __init__(self, seen: Any) -> None:
        super().__init__(1, 1)
        self.seen = seen

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


@pytest.mark.parametrize("seen", [torch.zeros(0), {"steps": 0}])
@pytest.mark.parametrize("trained", [torch.ones(3), {"steps": 3}])
def test_an_extra_state_comes_back_in_any_form(seen: Any, trained: Any) -> None:
    model = nn.Sequential(Remembering(seen))
    state = {"0.weight": torch.ones(1, 1), "0.bias": torch.ones(1), "0._extra_state": trained}
    paths, _lines, warnings = load_back({0: model}, {0: state}, {})
    assert (paths, warnings) == ({0}, [])
    assert model[0].seen is trained
    assert model[0].weight.item() == 1.0


def test_quantised_model_loads_without_frozen_weights() -> None:
    model = Adapted()
    sent = {name: value for name, value in model.state_dict().items() if name.startswith("lora_")}
    load_into(model, 0, {name: torch.ones_like(value) for name, value in sent.items()})
    assert model.lora_B.weight.unique().tolist() == [1.0]
