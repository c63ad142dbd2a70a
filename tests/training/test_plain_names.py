"""Names of weights in files, in state dicts and sent to the kernel: without wrappers' additions."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from nblaunch import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    notebook_launcher,
    utils,
)
from nblaunch.errors import CheckpointError
from tests.training import ranks
from tests.training.ranks import rank_server  # noqa: F401 (a fixture)

compiled: Any = functools.partial(torch.compile, backend="eager")
PLAIN = [
    "body.0.bias",
    "body.0.weight",
    "body.1.bias",
    "body.1.num_batches_tracked",
    "body.1.running_mean",
    "body.1.running_var",
    "body.1.weight",
    "first.bias",
    "first.weight",
]


class Network(nn.Module):
    """A model with a layer, and a body of other layers."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 4)
        self.body: Any = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.first(x))


def _wrapped(kind: str, seed: int = 0) -> Network:
    network = Network(seed)
    if kind == "compiled":
        network.body = compiled(network.body)
    elif kind == "twice":
        network.body[0] = compiled(network.body[0])
        network.body = compiled(network.body)
    elif kind == "data parallel":
        network.body = nn.DataParallel(network.body)
    elif kind == "checkpointed":
        network.body = checkpoint_wrapper(compiled(network.body))
    elif kind == "by regions":
        network.body.compile(backend="eager")
    return network


def _equal(some: nn.Module, others: nn.Module) -> bool:
    pairs = zip(some.parameters(), others.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("kind", ["compiled", "twice", "data parallel", "checkpointed", "by regions"])
def test_wrapped_parts_have_plain_names(tmp_path: Path, kind: str) -> None:
    accelerator = Accelerator()
    network = _wrapped(kind)
    model = accelerator.prepare(network)
    assert sorted(accelerator.get_state_dict(model)) == PLAIN
    accelerator.save_model(model, tmp_path / "model")
    accelerator.save_state(tmp_path / "state")
    for folder in ("model", "state"):
        assert sorted(load_file(tmp_path / folder / "model.safetensors")) == PLAIN
    unwrapped = accelerator.unwrap_model(model, keep_torch_compile=False)
    assert sorted(name for name in unwrapped.state_dict()) == PLAIN
    assert next(unwrapped.parameters()) is next(network.parameters())

    unwrapped_others: list[nn.Module] = [Network(1), _wrapped(kind, 1)]
    for other in unwrapped_others:
        load_checkpoint_in_model(other, tmp_path / "model", strict=True)
        assert _equal(other, network)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    accelerator.load_state(tmp_path / "state")
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_a_copy_without_compiled_parts_computes_alike() -> None:
    accelerator = Accelerator()
    network = _wrapped("twice").eval()
    inputs = torch.ones(2, 3)
    unwrapped = accelerator.unwrap_model(accelerator.prepare(network), keep_torch_compile=False)
    with torch.no_grad():
        assert torch.equal(unwrapped(inputs), network(inputs))
    assert not any(map(utils.is_compiled_module, unwrapped.modules()))
    assert utils.is_compiled_module(network.body)


def test_files_may_have_names_of_wrappers(tmp_path: Path) -> None:
    network = Network()
    for number, add in enumerate(
        (
            lambda name: f"module.{name}",
            lambda name: f"_orig_mod.{name}",
            lambda name: f"_orig_mod.module.{name}",
            lambda name: name.replace("body.", "body._orig_mod."),
            lambda name: f"_fsdp_wrapped_module.{name.replace('body.', 'body._fsdp_wrapped_module.')}",
            lambda name: name.replace("body.", "body._checkpoint_wrapped_module._orig_mod."),
        )
    ):
        path = tmp_path / f"{number}.safetensors"
        save_file({add(name): value for name, value in network.state_dict().items()}, path)
        for kind in ("", "compiled"):
            other = _wrapped(kind, 1)
            load_checkpoint_in_model(other, path, strict=True)
            assert _equal(other, network), number
        empty = _wrapped("", 1).to("meta")
        load_checkpoint_and_dispatch(empty, path, strict=True)
        assert _equal(empty, network), number


@pytest.mark.parametrize("front", ["base_model.model.", "something_else_"])
def test_a_file_without_any_name_of_the_model_is_an_error(tmp_path: Path, front: str) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({front + name: value for name, value in Network().state_dict().items()}, path)
    other = Network(1)
    before = other.first.weight.clone()
    with pytest.raises(CheckpointError, match="no name matches") as caught:
        load_checkpoint_in_model(other, path)
    assert torch.equal(other.first.weight, before)
    assert ("'base_model.model.' precedes the names in the file" in str(caught.value)) is front.endswith(".")


def _train(model: Network) -> None:
    if not utils.is_compiled_module(model.body):
        model.body = compiled(model.body)
    Accelerator().prepare(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)


def test_weights_of_parts_that_a_worker_compiles_come_back() -> None:
    for model in (Network(), _wrapped("compiled")):
        notebook_launcher(_train, (model,), num_processes=1, dashboard="none")
        inner = getattr(model.body, "_orig_mod", model.body)
        assert torch.equal(inner[0].weight, torch.full((2, 4), 7.0))
        assert torch.equal(model.first.bias, torch.full((4,), 7.0))


def _save_sharded(folder: str, kind: str) -> list[str]:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(state_dict_type=kind))
    network = _wrapped("compiled")
    network.body._orig_mod[1] = nn.Tanh()
    model = accelerator.prepare(network)
    before = accelerator.get_state_dict(model)
    accelerator.save_state(folder)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.zero_()
    accelerator.load_state(folder)
    after = accelerator.get_state_dict(model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    return sorted(before)


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_sharded_models_have_plain_names(tmp_path: Path, kind: str) -> None:
    expected = [name for name in PLAIN if "body.1" not in name]
    assert ranks.run(_save_sharded, 2, str(tmp_path / "state"), kind)[0] == expected
