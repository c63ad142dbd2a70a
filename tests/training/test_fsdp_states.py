"""Sharded models and optimizers that a trainer writes one by one, and merged shards."""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from nblaunch import Accelerator, CheckpointError, FullyShardedDataParallelPlugin, cli, utils
from tests.training import ranks


def _trained(kind: str | None, seed: int) -> tuple[Any, Any, nn.Module, Any]:
    torch.manual_seed(seed)
    plugin = None if kind is None else FullyShardedDataParallelPlugin(state_dict_type=kind)
    accelerator = Accelerator(fsdp_plugin=plugin)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(2, 3)).pow(2).sum())
    optimizer.step()
    optimizer.zero_grad()
    return plugin, accelerator, model, optimizer


def _whole(model: nn.Module) -> dict[str, list[Any]]:
    whole = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }
    return {name: value.tolist() for name, value in whole.items()}


def _first_moment(optimizer: Any) -> list[list[Any]]:
    moments = [state["exp_avg"] for state in optimizer.state_dict()["state"].values()]
    return [(one.full_tensor() if hasattr(one, "full_tensor") else one).tolist() for one in moments]


def _round(kind: str, folder: Path) -> tuple[Any, Any]:
    plugin, accelerator, model, optimizer = _trained(kind, 0)
    saved = _whole(model), _first_moment(optimizer)
    utils.save_fsdp_model(plugin, accelerator, model, folder)
    utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    plugin, accelerator, model, optimizer = _trained(kind, 1)
    assert _whole(model) != saved[0]
    utils.load_fsdp_model(plugin, accelerator, model, folder)
    utils.load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    assert (_whole(model), _first_moment(optimizer)) == saved
    return saved


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_models_and_optimizers_come_back(kind: str, tmp_path: Path) -> None:
    first, second = ranks.run(_round, 2, kind, tmp_path)
    assert first == second
    names = sorted(path.name for path in tmp_path.iterdir())
    if kind == "FULL_STATE_DICT":
        assert names == ["optimizer.bin", "pytorch_model_fsdp.bin"]
        return
    assert names == ["optimizer_0", "pytorch_model_fsdp_0"]
    with pytest.raises(CheckpointError, match="did you mean"):
        utils.merge_fsdp_weights(tmp_path, tmp_path / "merged")
    assert cli.main(["merge-weights", str(tmp_path), str(tmp_path / "merged")]) == 2
    shards, merged = str(tmp_path / "pytorch_model_fsdp_0"), str(tmp_path / "by_command")
    assert cli.main(["merge-weights", shards, merged, "--unsafe_serialization"]) == 0
    by_command = torch.load(tmp_path / "by_command" / "pytorch_model.bin", weights_only=True)
    assert {name: value.tolist() for name, value in by_command.items()} == first[0]
    for inside in (shards, f"{shards}/merged"):
        assert cli.main(["merge-weights", shards, inside, "--remove_checkpoint_dir"]) == 2
    for safe, file in ((False, "pytorch_model.bin"), (True, "model.safetensors")):
        utils.merge_fsdp_weights(tmp_path / "pytorch_model_fsdp_0", tmp_path / "merged", safe, safe)
        path = tmp_path / "merged" / file
        merged = load_file(path) if safe else torch.load(path, weights_only=True)
        assert {name: value.tolist() for name, value in merged.items()} == first[0]
    assert not (tmp_path / "pytorch_model_fsdp_0").exists()


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_damaged_or_foreign_states_are_rejected(kind: str, tmp_path: Path) -> None:
    def save_those_of_another_model() -> None:
        plugin = FullyShardedDataParallelPlugin(state_dict_type=kind)
        accelerator = Accelerator(fsdp_plugin=plugin)
        module = nn.Sequential(nn.Linear(3, 2))
        model, optimizer = accelerator.prepare(module, torch.optim.AdamW(module.parameters()))
        accelerator.backward(model(torch.ones(2, 3)).pow(2).sum())
        optimizer.step()
        utils.save_fsdp_model(plugin, accelerator, model, tmp_path)
        utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, tmp_path)

    def problems() -> list[str]:
        plugin, accelerator, model, optimizer = _trained(kind, 1)
        messages = []
        for load in (
            lambda: utils.load_fsdp_model(plugin, accelerator, model, tmp_path),
            lambda: utils.load_fsdp_optimizer(plugin, accelerator, optimizer, model, tmp_path),
        ):
            with pytest.raises(CheckpointError) as caught:
                load()
            messages.append(str(caught.value))
        return messages

    names = ["pytorch_model_fsdp", "optimizer"]
    ranks.run(save_those_of_another_model, 2)
    for found in ranks.run(problems, 2):
        for name, message in zip(names, found, strict=True):
            assert re.search(rf"{name}(_0|\.bin) does not fit the prepared objects, or is damaged", message)
    for path in (path for name in names for path in tmp_path.glob(f"{name}*")):
        (path if path.is_file() else path / ".metadata").write_bytes(b"no states")
    for found in ranks.run(problems, 2):
        for name, message in zip(names, found, strict=True):
            assert re.search(rf"{name}(_0|\.bin) does not fit the prepared objects, or is damaged", message)


def _save_as_the_reference_does(folder: Path) -> tuple[Any, Any]:
    plugin, accelerator, model, optimizer = _trained("FULL_STATE_DICT", 0)
    utils.save_fsdp_model(plugin, accelerator, model, folder)
    utils.save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    accelerator.save_state(str(folder / "ours"))
    name = f"random_states_{accelerator.process_index}.pkl"
    (folder / "ours" / name).rename(folder / name)
    return _whole(model), _first_moment(optimizer)


def _load_state_of_the_reference(folder: Path, kind: str | None) -> tuple[Any, Any]:
    _, accelerator, model, optimizer = _trained(kind, 1)
    accelerator.load_state(folder)
    return _whole(accelerator.unwrap_model(model)), _first_moment(optimizer)


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT", None])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_accelerates_full_fsdp_checkpoints_are_read(num_ranks: int, kind: str | None, tmp_path: Path) -> None:
    """Its optimizer states are keyed by parameter names."""
    saved, _ = ranks.run(_save_as_the_reference_does, 2, tmp_path)
    path = tmp_path / "optimizer.bin"
    state = torch.load(path, weights_only=True)
    state["param_groups"][0]["params"].reverse()  # version 1 uses its own order
    torch.save(state, path)
    for loaded in ranks.run(_load_state_of_the_reference, num_ranks, tmp_path, kind):
        assert loaded == saved


def test_missing_shards_are_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"contains no shards"):
        utils.merge_fsdp_weights(tmp_path, tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"nowhere does not exist"):
        utils.merge_fsdp_weights(tmp_path / "nowhere", tmp_path / "out")
    (tmp_path / "pytorch_model_fsdp_0").mkdir()
    (tmp_path / "pytorch_model_fsdp_0" / ".metadata").touch()
    with pytest.raises(CheckpointError, match=r"did you mean .*pytorch_model_fsdp_0"):
        utils.merge_fsdp_weights(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("content", [b"", b"no states", pickle.dumps({})], ids=["empty", "other", "pickle"])
def test_a_damaged_file_of_shards_to_merge_is_named(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = tmp_path / ".metadata"
    metadata.write_bytes(content)
    with pytest.raises(CheckpointError, match=re.escape(str(metadata))):
        utils.merge_fsdp_weights(tmp_path, tmp_path / "out")
    assert cli.main(["merge-weights", str(tmp_path), str(tmp_path / "out")]) == 2
    assert str(metadata) in capsys.readouterr().err


def test_a_missing_file_of_shards_to_merge_is_named(tmp_path: Path) -> None:
    utils.save_fsdp_model(None, Accelerator(), nn.Linear(2, 2), tmp_path)
    folder = tmp_path / "pytorch_model_fsdp_0"
    (shards,) = folder.glob("*.distcp")
    shards.unlink()
    with pytest.raises(CheckpointError, match=rf"damaged.*{shards.name}"):
        utils.merge_fsdp_weights(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
