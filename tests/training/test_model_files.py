"""Files of weights: shards, shared tensors, sizes, and reading, also into models without memory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pickle
import string
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nblaunch import Accelerator, CheckpointError, init_empty_weights, load_checkpoint_and_dispatch, utils
from nblaunch.topology import Topology
from nblaunch.training.checkpoints import files, model_files
from nblaunch.training.checkpoints.load_weights import load_checkpoint_in_model
from nblaunch.training.checkpoints.model_files import save_sharded
from nblaunch.training.shared_state import get_shared_state


class Tied(nn.Module):
    """A module with two names for one weight, a view of a part of it, and an empty buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("first_rows", self.embed.weight.detach()[:2])
        self.register_buffer("none", torch.empty(0, 3))
        self.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())


def _same(one: nn.Module, other: nn.Module) -> bool:
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("safe_serialization", [True, False])
@pytest.mark.parametrize("max_shard_size", ["10GB", 60])
def test_shared_tensors_come_back(tmp_path: Path, safe_serialization: bool, max_shard_size: Any) -> None:
    model, other = Tied(), Tied()
    Accelerator().save_model(model, tmp_path / "m", max_shard_size, safe_serialization)
    load_checkpoint_in_model(other, tmp_path / "m", strict=True)
    assert _same(model, other)
    assert other.head.weight is other.embed.weight


def test_lazily_conjugated_and_negated_views_keep_their_numbers(tmp_path: Path) -> None:
    """They differ from their base only by a flag of the tensor, which safetensors ignores."""
    base, alone = torch.tensor([1 + 2j, 3 - 4j]), torch.tensor([5 + 6j])
    views = {
        "base": base,
        "conjugated": base.conj(),
        "imaginary": base.imag,
        "negated": base.conj().imag,
        "alone": alone.conj(),
    }
    model, other = nn.Module(), nn.Module()
    for name, view in views.items():
        model.register_buffer(name, view)
        other.register_buffer(name, torch.zeros_like(view))
    save_sharded(model.state_dict(), tmp_path)
    load_checkpoint_in_model(other, tmp_path, strict=True)
    assert _same(model, other)


def test_shared_tensors_are_written_once_and_read_by_others(tmp_path: Path) -> None:
    save_sharded(Tied().state_dict(), tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size < 800
    # Written by a library that omits the second name silently.
    model, other = Tied(), Tied()
    weights = {
        name: value.contiguous() for name, value in model.state_dict().items() if name != "head.weight"
    }
    weights["first_rows"] = weights["first_rows"].clone()
    safetensors.torch.save_file(weights, tmp_path / "model.safetensors")
    load_checkpoint_in_model(other, tmp_path, strict=True)
    assert _same(model, other)
    # safetensors' own loader, which does not support views, reads our file.
    del model.first_rows, other.first_rows
    save_sharded(model.state_dict(), tmp_path)
    torch.nn.init.zeros_(other.head.weight)
    assert safetensors.torch.load_model(other, tmp_path / "model.safetensors") == (set(), [])
    assert _same(model, other)


def test_shards_have_an_index_and_stale_ones_go(tmp_path: Path) -> None:
    weights = OrderedDict((name, torch.full((4,), float(i))) for i, name in enumerate("abc"))
    (tmp_path / "config.json").write_text("{}")
    save_sharded(weights, tmp_path, 32)
    assert sorted(files.files_below(tmp_path)) == [
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 48}
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00001-of-00002.safetensors",
        "c": "model-00002-of-00002.safetensors",
    }
    save_sharded(weights, tmp_path, 16, safe_serialization=False)
    assert len(files.files_below(tmp_path)) == 5
    save_sharded(weights, tmp_path)
    assert sorted(files.files_below(tmp_path)) == ["config.json", "model.safetensors"]


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(0, 20), max_size=12), limit=st.integers(1, 100))
def test_shards_are_complete_and_within_their_size(sizes: list[int], limit: int) -> None:
    weights = {f"w{i}": torch.arange(float(size)) for i, size in enumerate(sizes)}
    shards = list(model_files._shards(weights, limit))
    assert [name for shard in shards for name in shard] == list(weights)
    for shard in shards:
        total = sum(value.numel() * 4 for value in shard.values())
        assert total <= limit or sum(value.numel() > 0 for value in shard.values()) == 1


def test_unsavable_weights_are_reported(tmp_path: Path) -> None:
    accelerator = Accelerator()
    with pytest.raises(RuntimeError, match="'weight' is on the meta device"):
        accelerator.save_model(nn.Linear(1, 1, device="meta"), tmp_path / "m")
    with pytest.raises(
        CheckpointError, match=r"state has 'x\._extra_state', a dict.*safe_serialization=False"
    ):
        save_sharded({"x._extra_state": {}}, tmp_path / "m")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="file is a file; a folder is needed"):
        accelerator.save_model(nn.Linear(1, 1), tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_unreadable_files_are_reported(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(CheckpointError, match=r"nothing\.bin does not exist"):
        load_checkpoint_in_model(model, tmp_path / "nothing.bin")
    with pytest.raises(CheckpointError, match=r"no weights.* model\.safetensors, "):
        load_checkpoint_in_model(model, tmp_path)
    save_sharded(model.state_dict(), tmp_path, 4)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors does not exist"):
        load_checkpoint_in_model(model, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(CheckpointError, match="is not an index of weights"):
        load_checkpoint_in_model(model, tmp_path)


def _cut(path: Path) -> None:
    torch.save(nn.Linear(1, 1).state_dict(), path, _use_new_zipfile_serialization=False)
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: path.write_bytes(b"no weights"),
            "is damaged, or contains objects of untrusted classes",
        ),
        (_cut, r"(can't be read; is it damaged|is damaged, or)"),
        (lambda path: torch.save([1, 2], path), r"can't be read; is it damaged\? \(TypeError: "),
        (
            lambda path: torch.save({"weight": string.Template("runs code")}, path),
            r"is damaged, or contains objects of untrusted classes \(.*string\.Template",
        ),
    ],
    ids=["other bytes", "cut short", "list", "untrusted"],
)
def test_files_without_a_state_dict_are_rejected(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / "pytorch_model.bin"
    damage(path)
    accelerator = Accelerator()
    model = accelerator.prepare(nn.Linear(1, 1))
    accelerator.register_load_state_pre_hook(lambda models, folder: None)
    for load in (
        lambda: load_checkpoint_in_model(model, path),
        lambda: accelerator.load_state(tmp_path),
    ):
        with pytest.raises(CheckpointError, match=f"{path.name} {message}"):
            load()


def test_a_parameter_may_have_any_name(tmp_path: Path) -> None:
    """The header of the file contains names of tied tensors, and its format."""
    model, other = nn.Module(), nn.Module()
    for one in (model, other):
        one.pt = nn.Parameter(torch.rand(2))
    save_sharded(model.state_dict(), tmp_path)
    load_checkpoint_in_model(other, tmp_path, strict=True)
    assert _same(model, other)


def test_files_have_no_wrapper_names(tmp_path: Path) -> None:
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(2, 1))
    compiled = torch.compile(model, backend="eager")
    assert list(accelerator.get_state_dict(compiled)) == ["0.weight", "0.bias"]
    assert list(accelerator.get_state_dict(compiled, unwrap=False)) == [
        "_orig_mod.0.weight",
        "_orig_mod.0.bias",
    ]
    accelerator.save_model(compiled, tmp_path)
    assert list(safetensors.torch.load_file(tmp_path / "model.safetensors")) == ["0.bias", "0.weight"]


def test_lazy_layers_are_prepared_and_load_their_weights(tmp_path: Path) -> None:
    accelerator = Accelerator()
    models = [nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d(), nn.Linear(3, 2)) for _ in range(2)]
    first = accelerator.prepare(models[0])
    first(torch.ones(2, 4))
    accelerator.save_state(tmp_path)
    accelerator.free_memory()
    second = accelerator.prepare(models[1])
    accelerator.load_state(tmp_path)
    assert _same(first, second)


def test_single_objects_are_saved(tmp_path: Path) -> None:
    accelerator = Accelerator()
    accelerator.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt")["a"].tolist() == [1, 1]
    accelerator.save({"a": torch.ones(2)}, tmp_path / "a.safetensors", safe_serialization=True)
    assert safetensors.torch.load_file(tmp_path / "a.safetensors")["a"].tolist() == [1, 1]
    with (tmp_path / "b.pt").open("wb") as file:
        accelerator.save(b"bytes", file)
    accelerator.save(b"bytes", tmp_path / "c.pt")
    assert torch.load(tmp_path / "b.pt", weights_only=False) == b"bytes"
    assert torch.load(tmp_path / "c.pt", weights_only=False) == b"bytes"
    # depends on the Python version
    with pytest.raises((AttributeError, pickle.PicklingError), match="pickle"):
        accelerator.save(lambda: 1, tmp_path / "a.pt")
    assert torch.load(tmp_path / "a.pt")["a"].tolist() == [1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "a.safetensors", "b.pt", "c.pt"]


def test_the_first_rank_of_the_group_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes a process group that the script created itself, without environment variables."""
    accelerator = Accelerator()
    topology = Topology(rank=1, local_rank=1, world_size=2, local_world_size=2)
    shared = get_shared_state()
    monkeypatch.setattr(shared, "process", dataclasses.replace(shared.process, topology=topology))
    accelerator.save({"weight": torch.ones(1)}, tmp_path / "weights.bin")
    assert not (tmp_path / "weights.bin").exists()


class Versioned(nn.Module):
    """Rejects a state dict without its version, like some models of torchvision."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def _load_from_state_dict(self, state: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        if local_metadata.get("version") != 2:
            raise ValueError(f"version {local_metadata.get('version')}")
        super()._load_from_state_dict(state, prefix, local_metadata, *rest)


@pytest.mark.parametrize("safe_serialization", [True, False])
@pytest.mark.parametrize("max_shard_size", ["10GB", 20])
def test_versions_of_modules_are_saved(tmp_path: Path, safe_serialization: bool, max_shard_size: Any) -> None:
    accelerator, model, other = Accelerator(), Versioned(), Versioned()
    accelerator.save_model(model, tmp_path / "m", max_shard_size, safe_serialization)
    load_checkpoint_in_model(other, tmp_path / "m", strict=True)
    assert _same(model, other)
    wrapped = nn.Sequential()
    wrapped.add_module("module", model)  # the name under wrappers of parallel training
    accelerator.save_model(wrapped, tmp_path / "w", max_shard_size, safe_serialization)
    load_checkpoint_in_model(Versioned(), tmp_path / "w", strict=True)


@pytest.mark.parametrize("safe_serialization", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_versions_of_modules_are_in_checkpoints(
    tmp_path: Path, safe_serialization: bool, asynchronous: bool
) -> None:
    accelerator = Accelerator()
    model = accelerator.prepare(Versioned())
    Versioned().load_state_dict(accelerator.get_state_dict(model))
    accelerator.save_state(tmp_path / "c", safe_serialization=safe_serialization, asynchronous=asynchronous)
    before = model.layer.weight.detach().clone()
    nn.init.zeros_(model.layer.weight)
    accelerator.load_state(tmp_path / "c")
    assert torch.equal(model.layer.weight, before)


# --- load_checkpoint_and_dispatch: a model stays whole, or Accelerate splits it --------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> torch.nn.Linear:
    model = torch.nn.Linear(3, 2)
    Accelerator(cpu=True).save_model(model, tmp_path)
    return model


def test_an_empty_model_is_filled_and_comes_back(saved: torch.nn.Linear, tmp_path: Path) -> None:
    with init_empty_weights():
        empty = torch.nn.Linear(3, 2)
    loaded = load_checkpoint_and_dispatch(
        empty, tmp_path, device_map={"": "cpu"}, no_split_module_classes=["Block"]
    )
    assert loaded is empty
    assert torch.equal(loaded.weight, saved.weight)


def test_weights_are_converted(saved: torch.nn.Linear, tmp_path: Path) -> None:
    loaded = load_checkpoint_and_dispatch(torch.nn.Linear(3, 2), tmp_path, dtype="bfloat16")
    assert torch.equal(loaded.weight, saved.weight.bfloat16())


def test_splitting_device_maps_need_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # the thread would outlive the test
    with init_empty_weights():
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    saved = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    Accelerator(cpu=True).save_model(saved, tmp_path / "saved")
    dispatched = load_checkpoint_and_dispatch(
        model, tmp_path / "saved", {"0": "cpu", "1": "disk"}, offload_folder=str(tmp_path / "offloaded")
    )
    batch = torch.ones(1, 3)
    assert dispatched[1].weight.is_meta
    assert torch.equal(dispatched(batch), saved(batch))


def test_invalid_arguments_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="devicemap"):
        load_checkpoint_and_dispatch(torch.nn.Linear(3, 2), tmp_path, devicemap=None)
    for argument in ("keep_in_fp32_modules", "offload_8bit_bnb"):  # an argument of load_checkpoint_in_model
        with pytest.raises(TypeError, match=argument):
            load_checkpoint_and_dispatch(torch.nn.Linear(3, 2), tmp_path, **{argument: ["norm"]})
    with pytest.raises(ValueError, match="dtype='bf16'"):
        load_checkpoint_and_dispatch(torch.nn.Linear(3, 2), tmp_path, dtype="bf16")


class Rotary(torch.nn.Module):
    """A model with an unsaved buffer, such as the frequencies of rotary embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = torch.nn.LayerNorm(2), torch.nn.Linear(2, 2)
        self.register_buffer("frequencies", torch.tensor([1.0, 0.01]), persistent=False)


@pytest.mark.parametrize("is_empty", [True, False])
def test_only_saved_tensors_are_converted(tmp_path: Path, is_empty: bool) -> None:
    Accelerator(cpu=True).save_model(Rotary(), tmp_path)
    with init_empty_weights() if is_empty else contextlib.nullcontext():
        model = Rotary()
    load_checkpoint_and_dispatch(model, tmp_path, {"": "cpu"}, dtype=torch.bfloat16)
    assert {weight.dtype for weight in model.state_dict().values()} == {torch.bfloat16}
    assert torch.equal(model.frequencies, Rotary().frequencies)


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}])
@pytest.mark.parametrize(
    ("dtype", "of_norm"), [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)]
)
def test_modules_can_stay_in_float32_beside_float16(
    tmp_path: Path, dtype: torch.dtype, of_norm: torch.dtype, device_map: dict[str, str] | None
) -> None:
    Accelerator(cpu=True).save_model(Rotary(), tmp_path)
    with init_empty_weights():
        model = Rotary()
    utils.load_checkpoint_in_model(model, tmp_path, device_map, dtype=dtype, keep_in_fp32_modules=["norm"])
    assert (model.norm.weight.dtype, model.layer.weight.dtype) == (of_norm, dtype)
    weights = [(one.data_ptr(), one.dtype) for one in model.parameters()]
    utils.load_checkpoint_in_model(model, tmp_path, dtype=dtype, keep_in_fp32_modules=["norm"])
    assert [(one.data_ptr(), one.dtype) for one in model.parameters()] == weights, "what has memory is filled"
