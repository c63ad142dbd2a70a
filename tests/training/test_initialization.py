"""Models that are built without memory or on another device, and filled afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nblaunch import (
    Accelerator,
    CheckpointError,
    init_empty_weights,
    init_on_device,
    load_checkpoint_in_model,
)


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embedding.weight
        self.norm.weight.requires_grad_(False)


def test_parameters_have_no_memory_and_buffers_do() -> None:
    with init_empty_weights():
        model = _Tied()
        model.register_parameter("nothing", None)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert model.head.weight is model.embedding.weight
    assert not model.norm.weight.requires_grad
    assert not nn.Linear(1, 1).weight.is_meta  # after the block, everything is as before


def test_buffers_may_be_created_without_memory() -> None:
    with init_empty_weights(include_buffers=True):
        model = nn.BatchNorm1d(3)
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_parameters_on_the_device_are_not_replaced() -> None:
    with init_on_device(torch.device("cpu")):
        model = _Tied()
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.device.type == "cpu"


def test_the_block_ends_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), init_empty_weights():
        _ = 1 / 0
    assert not nn.Linear(1, 1).weight.is_meta


@pytest.mark.parametrize("include_buffers", [False, True])
@pytest.mark.parametrize("max_shard_size", ["10GB", "100B"])
def test_a_checkpoint_gives_an_empty_model_its_weights(
    tmp_path: Path, include_buffers: bool, max_shard_size: str
) -> None:
    accelerator, trained = Accelerator(), _Tied()
    trained.norm(torch.randn(5, 4))
    accelerator.save_model(trained, tmp_path, max_shard_size=max_shard_size)
    with init_empty_weights(include_buffers):
        model = _Tied()
    load_checkpoint_in_model(model, tmp_path)
    assert {name: value.tolist() for name, value in model.state_dict().items()} == {
        name: value.tolist() for name, value in trained.state_dict().items()
    }
    assert model.head.weight is model.embedding.weight
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in trained.parameters()]
    model = accelerator.prepare(model)
    accelerator.backward(model.head(torch.ones(2, 4)).sum())
    assert model.embedding.weight.grad is not None


def test_tensors_missing_in_a_checkpoint_stay_on_meta(tmp_path: Path) -> None:
    """With zeros instead, training would continue without a warning."""
    accelerator = Accelerator()
    accelerator.save_model(nn.Sequential(nn.Linear(2, 2)), tmp_path)
    with init_empty_weights():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    load_checkpoint_in_model(model, tmp_path)
    assert [parameter.is_meta for parameter in model.parameters()] == [False, False, True, True]
    with pytest.raises(CheckpointError, match=r"1\.weight"):
        load_checkpoint_in_model(model, tmp_path, strict=True)


def _lies_on(tensor: torch.Tensor, folder: Path) -> bool:
    """Return whether a tensor's memory belongs to a file in ``folder``."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, _, _, _, _, *name = line.split(maxsplit=5)
        start, end = (int(number, 16) for number in span.split("-"))
        if start <= tensor.data_ptr() < end:
            return bool(name) and name[0].startswith(str(folder))
    return False


def _pair() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@pytest.mark.parametrize("settings", [{}, {"max_shard_size": 100}, {"safe_serialization": False}])
def test_meta_tensors_are_mapped_to_the_file(tmp_path: Path, settings: dict[str, Any]) -> None:
    saved = _pair()
    Accelerator(cpu=True).save_model(saved, tmp_path, **settings)
    before = [parameter.detach().clone() for parameter in saved.parameters()]
    with init_empty_weights():
        model = _pair()
    load_checkpoint_in_model(model, tmp_path, strict=True)
    assert all(_lies_on(parameter, tmp_path) for parameter in model.parameters())
    with torch.no_grad():
        for loaded, expected in zip(model.parameters(), before, strict=True):
            assert torch.equal(loaded, expected)
            loaded.add_(1)
    load_checkpoint_in_model(saved, tmp_path)
    assert all(map(torch.equal, saved.parameters(), before)), "the file was changed"


def test_one_tensor_can_fill_untied_parameters(tmp_path: Path) -> None:
    saved = _pair()
    saved[1].weight = saved[0].weight
    Accelerator(cpu=True).save_model(saved, tmp_path)
    with init_empty_weights():
        model = _pair()
    load_checkpoint_in_model(model, tmp_path)
    with torch.no_grad():
        model[0].weight.zero_()
    assert torch.equal(model[1].weight, saved[1].weight)


def test_weights_are_converted_while_they_are_read(tmp_path: Path) -> None:
    saved = nn.Linear(4, 4)
    Accelerator(cpu=True).save_model(saved, tmp_path)
    with init_empty_weights():
        model = nn.Linear(4, 4)
    load_checkpoint_in_model(model, tmp_path, dtype="bfloat16")
    assert torch.equal(model.weight, saved.weight.bfloat16())


def test_names_of_all_files_together_are_compared(tmp_path: Path) -> None:
    Accelerator(cpu=True).save_model(_pair(), tmp_path, max_shard_size=70)
    other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 4))
    with pytest.raises(
        CheckpointError, match=r"Missing key.*: 2\.bias, 2\.weight; Unexpected key.*: 1\.bias$"
    ):
        load_checkpoint_in_model(other, tmp_path, strict=True)


class _Copying(nn.Module):
    """A module with its own loading method, which needs all names at once, and memory to copy to."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *args: Any) -> None:
        with torch.no_grad():
            self.one.copy_(state[f"{prefix}one"])
            self.other.copy_(state[f"{prefix}other"])


def test_custom_loading_gets_memory_and_all_names(tmp_path: Path) -> None:
    saved = nn.Sequential(_Copying(), nn.Linear(2, 1))
    for parameter in saved.parameters():
        nn.init.normal_(parameter)
    Accelerator(cpu=True).save_model(saved, tmp_path, max_shard_size=8)
    with init_empty_weights():
        model = nn.Sequential(_Copying(), nn.Linear(2, 1))
    load_checkpoint_in_model(model, tmp_path, strict=True)
    assert all(map(torch.equal, model.parameters(), saved.parameters()))


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
def test_a_file_may_have_either_name_of_tied_weights(tmp_path: Path, name: str) -> None:
    torch.save({name: torch.ones(6, 4)}, tmp_path / "pytorch_model.bin")
    with init_empty_weights():
        model = _Tied()
    load_checkpoint_in_model(model, tmp_path)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.head.weight, torch.ones(6, 4))
