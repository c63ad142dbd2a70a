"""Weights straight from disk into a model, under the names that scripts of Hugging Face Accelerate call.

A model that stays whole is loaded here. A device map that cuts it into pieces is for an installed Accelerate.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nblaunch.compat import delegated
from nblaunch.training.checkpoints import model_files
from nblaunch.training.checkpoints.loading import load_weights
from nblaunch.training.models import bare_module

_OF_PIECES = (
    "max_memory", "no_split_module_classes", "offload_folder", "offload_buffers", "offload_state_dict", "skip_keys",
    "preload_module_classes", "force_hooks", "full_state_dict", "broadcast_from_rank0", "keep_in_fp32_modules",
    "offload_8bit_bnb",
)  # fmt: skip
"""Arguments that say how a model is cut. They mean nothing for one that stays whole."""


def load_checkpoint_in_model(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Any] | str | None = None,
    offload_folder: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    *,
    strict: bool = False,
    device: str | torch.device = "cpu",
    **of_pieces: Any,
) -> None:
    """Load into ``model`` what :meth:`Accelerator.save_model` wrote.

    What has no memory yet (``init_empty_weights``) is not copied on the CPU, unless it is converted: it lies on the
    pages of the file, which the system reads when they are used. Programs that write to the file itself meanwhile
    would change it; what nblaunch saves in its place is another file.

    Args:
        model: a module, wrapped or not, filled in place.
        checkpoint: a file of weights, an index, or a folder with one of them.
        device_map: None, or ``{"": device}``: where what has no memory yet goes. An installed Accelerate takes any
            other map, with the arguments that belong to it.
        offload_folder: Accelerate's argument for a map with ``"disk"``.
        dtype: of what has no memory yet and is of floating point; None: as the model says.
        strict: raise where names of the files and the model differ.
        device: where weights are read to, before they are copied into the model: those of all files, but for the CPU,
            where they lie on the pages of the files (unless these are of torch's format before 1.6).
        **of_pieces: Accelerate's other arguments for a map; without effect where there is none.

    Raises:
        CheckpointError: there are no weights, they are damaged, or they don't fit.
        ImportError: ``device_map`` cuts the model into pieces, and Accelerate is not installed.
        TypeError: an unknown argument.
        ValueError: ``dtype`` is not the name of one.
    """
    _check_names("load_checkpoint_in_model", of_pieces)
    target = _dtype(dtype)
    if _cuts(device_map):
        of_pieces |= {"offload_folder": offload_folder, "dtype": target, "strict": strict}
        delegated.find(delegated.LOADING)(bare_module(model), checkpoint, device_map, **of_pieces)
        return
    place = torch.device(device_map[""]) if isinstance(device_map, Mapping) else None
    weights: dict[str, Any] = {}
    for file in model_files.files_of(Path(checkpoint)):
        weights |= model_files.read_weights(file, device)
    load_weights(model, weights, Path(checkpoint), strict, place, target)


def load_checkpoint_and_dispatch(
    model: torch.nn.Module,
    checkpoint: str | os.PathLike[str],
    device_map: Mapping[str, Any] | str | None = None,
    max_memory: Mapping[Any, Any] | None = None,
    no_split_module_classes: Any = None,
    *,
    dtype: str | torch.dtype | None = None,
    strict: bool = False,
    **of_pieces: Any,
) -> torch.nn.Module:
    """Load weights into ``model``, one of ``init_empty_weights`` maybe, and put it on its devices.

    Args:
        model: a module, filled in place.
        checkpoint: a file of weights, an index, or a folder with one of them.
        device_map: None: the model stays where it is; ``{"": device}``: it goes there as a whole. Any other map, such
            as ``"auto"``, cuts it into pieces: an installed Accelerate does that.
        max_memory: Accelerate's argument for ``device_map="auto"``.
        no_split_module_classes: Accelerate's argument for ``device_map="auto"``.
        dtype: convert floating point weights to this type, as ``torch.bfloat16`` or ``"bfloat16"``.
        strict: raise where names of the file and the model differ.
        **of_pieces: Accelerate's other arguments that say how a model is cut into pieces; without effect on one that
            stays whole.

    Returns:
        ``model``.

    Raises:
        CheckpointError: there are no weights, they are damaged, or they don't fit.
        ImportError: ``device_map`` cuts the model into pieces, and Accelerate is not installed.
        TypeError: an unknown argument.
        ValueError: ``dtype`` is not the name of one.
    """
    _check_names("load_checkpoint_and_dispatch", of_pieces)
    target = _dtype(dtype)
    if _cuts(device_map):
        dispatched: torch.nn.Module = delegated.find(delegated.DISPATCHING)(
            model,
            checkpoint,
            device_map,
            max_memory=max_memory,
            no_split_module_classes=no_split_module_classes,
            dtype=target,
            strict=strict,
            **of_pieces,
        )
        return dispatched
    device = torch.device(device_map[""]) if isinstance(device_map, Mapping) else None
    load_checkpoint_in_model(model, checkpoint, device_map, dtype=target, strict=strict)
    return model.to(device=device, dtype=target)


def _check_names(function: str, given: Mapping[str, Any]) -> None:
    for name in given:
        if name not in _OF_PIECES:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def _cuts(device_map: Mapping[str, Any] | str | None) -> bool:
    if device_map is None:
        return False
    return isinstance(device_map, str) or set(device_map) != {""} or device_map[""] == "disk"


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"dtype={dtype!r} is no type of floating point numbers, as torch.bfloat16 is")
    return found
