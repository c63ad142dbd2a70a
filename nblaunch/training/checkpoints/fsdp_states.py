"""Saves FSDP models and optimizers one by one, as trainers do, and merges shards of weights.

If the plugin's ``state_dict_type`` is ``"FULL_STATE_DICT"``, the main process writes one file of full tensors.
Otherwise each rank writes its shards into a folder. Names are the same as in Hugging Face Accelerate.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nblaunch.errors import CheckpointError
from nblaunch.training.checkpoints.files import OPTIMIZER_NAME, numbered
from nblaunch.training.checkpoints.model_files import save_sharded
from nblaunch.training.joining import waiting
from nblaunch.training.models import bare_module
from nblaunch.training.strategies import dtensor_strategy, shard_files
from nblaunch.training.strategies.dtensor_strategy import inner_optimizer

FSDP_MODEL_NAME = "pytorch_model_fsdp"

_UNREADABLE = (
    "can't be read: it is damaged, or from another version of torch. Copy the folder again from its source, or "
    "merge another checkpoint"
)


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Write the weights of a prepared model under ``output_dir``. All ranks must call this.

    Args:
        fsdp_plugin: the plugin whose ``state_dict_type`` selects the format.
        accelerator: the Accelerator that prepared the model.
        model: the prepared model.
        output_dir: the folder; created if it does not exist.
        model_index: the model's index, for the file's name.
        adapter_only: write only trained parameters.
        use_dcp: must be True: torch.distributed.checkpoint writes shards, which any number of ranks can load.

    Raises:
        ValueError: ``use_dcp`` is False.
    """
    _check_dcp(use_dcp)
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    state = get_model_state_dict(bare_module(model), options=_options(fsdp_plugin, adapter_only))
    _save(fsdp_plugin, accelerator, {"model": state}, Path(output_dir), FSDP_MODEL_NAME, model_index)


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Load weights that :func:`save_fsdp_model` wrote, with the same arguments. All ranks must call this.

    Raises:
        CheckpointError: the files are missing or damaged, or belong to another model.
    """
    _check_dcp(use_dcp)
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    module, path = bare_module(model), _place(fsdp_plugin, Path(input_dir), FSDP_MODEL_NAME, model_index)
    if not _is_full(fsdp_plugin):
        return dtensor_strategy.load_model(module, path, accelerator.num_processes == 1, adapter_only)
    weights, options = _read(path), _options(fsdp_plugin, adapter_only, strict=not adapter_only)
    with shard_files.loading(path):
        return set_model_state_dict(module, weights, options=options)


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    output_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Write the state of a prepared optimizer under ``output_dir``. See :func:`save_fsdp_model`."""
    _check_dcp(use_dcp)
    module, inner = bare_module(model), inner_optimizer(optimizer)
    state = dtensor_strategy.optimizer_state(module, inner, options=_options(fsdp_plugin))
    _save(fsdp_plugin, accelerator, {"optimizer": state}, Path(output_dir), OPTIMIZER_NAME, optimizer_index)


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    input_dir: str | os.PathLike[str],
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load a state that :func:`save_fsdp_optimizer` wrote. All ranks must call this.

    Raises:
        CheckpointError: the files are missing or damaged, or belong to another optimizer.
    """
    _check_dcp(use_dcp)
    module, inner = bare_module(model), inner_optimizer(optimizer)
    path = _place(fsdp_plugin, Path(input_dir), OPTIMIZER_NAME, optimizer_index)
    if not _is_full(fsdp_plugin):
        dtensor_strategy.load_optimizer(module, inner, path, accelerator.num_processes == 1)
        return
    state = _read(path)
    with shard_files.loading(path):
        dtensor_strategy.load_by_names(module, inner, state)


def merge_fsdp_weights(
    checkpoint_dir: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    safe_serialization: bool = True,
    remove_checkpoint_dir: bool = False,
) -> None:
    """Merge the shards of a model in a checkpoint into files that any tool can read. Call it in one process.

    Args:
        checkpoint_dir: the folder with ``.metadata`` and the ranks' files, such as ``pytorch_model_fsdp_0``.
        output_path: the folder for ``model.safetensors``, or for several files and their index; created if missing.
        safe_serialization: write safetensors files; False: torch's format, in ``pytorch_model.bin``.
        remove_checkpoint_dir: remove the shards after the full model has been written.

    Raises:
        CheckpointError: the folder has no shards, or they are damaged.
        ValueError: ``remove_checkpoint_dir`` would remove the merged model.
    """
    from torch.distributed import checkpoint as dcp

    folder = Path(checkpoint_dir)
    if remove_checkpoint_dir and Path(output_path).resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{output_path} is inside {folder}, which will be removed: choose another folder")
    if not folder.is_dir():
        raise CheckpointError(f"{folder} does not exist, or is not a folder")
    if not (folder / ".metadata").is_file():
        inside = [path.parent.name for path in sorted(folder.glob("*/.metadata"))]
        hint = f"; did you mean {' or '.join(str(folder / name) for name in inside)}?" if inside else ""
        raise CheckpointError(f"{folder} contains no shards of a model: it has no .metadata file{hint}")
    with shard_files.loading(folder / ".metadata", _UNREADABLE):
        entries = shard_files.read_metadata(folder).state_dict_metadata
    state: dict[str, Any] = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, dcp.metadata.TensorStorageMetadata)
    }
    shard_files.read(state, folder, is_alone=True, problem=_UNREADABLE)
    weights = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    save_sharded(weights, Path(output_path), "10GB", safe_serialization)
    if remove_checkpoint_dir:
        shutil.rmtree(folder)


def _check_dcp(use_dcp: bool) -> None:
    if not use_dcp:
        raise ValueError(
            "use_dcp=False would write one file per rank, which only the same number of ranks can load. nblaunch "
            "writes shards only with torch.distributed.checkpoint: leave use_dcp out, or set "
            "state_dict_type='FULL_STATE_DICT'"
        )


def _is_full(plugin: Any) -> bool:
    return "FULL" in str(getattr(plugin, "state_dict_type", "")).upper()


def _options(plugin: Any, adapter_only: bool = False, strict: bool = True) -> Any:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    is_full = _is_full(plugin)
    return StateDictOptions(
        full_state_dict=is_full,
        cpu_offload=is_full,
        broadcast_from_rank0=False,
        ignore_frozen_params=adapter_only,
        strict=strict,
    )


def _save(
    plugin: Any, accelerator: Any, state: dict[str, Any], output_dir: Path, name: str, index: int
) -> None:
    output_dir.mkdir(parents=True, exist_ok=True)
    if _is_full(plugin):
        (full,) = state.values()
        if accelerator.is_main_process:
            torch.save(full, output_dir / numbered(f"{name}.bin", index))
        accelerator.wait_for_everyone()
    else:
        with waiting():
            shard_files.write(state, output_dir / f"{name}_{index}", is_alone=accelerator.num_processes == 1)


def _place(plugin: Any, input_dir: Path, name: str, index: int) -> Path:
    """Return the file of full tensors, or the folder of shards, which may be ``input_dir`` itself."""
    if _is_full(plugin):
        return input_dir / numbered(f"{name}.bin", index)
    folder = input_dir / f"{name}_{index}"
    return folder if folder.is_dir() else input_dir


def _read(path: Path) -> Any:
    """Read a file of full tensors."""
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist")
    with shard_files.loading(path):
        return torch.load(path, map_location="cpu", weights_only=True)
