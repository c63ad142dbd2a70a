"""Loading a model and putting it where it computes, under the name that scripts of Hugging Face Accelerate call.

A model that stays whole is loaded here. A device map that cuts it into pieces is for an installed Accelerate.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from nblaunch.compat import delegated
from nblaunch.training.checkpoints.model_files import load_checkpoint_in_model

_OF_PIECES = (
    "max_memory", "no_split_module_classes", "offload_folder", "offload_buffers", "offload_state_dict", "skip_keys",
    "preload_module_classes", "force_hooks", "full_state_dict", "broadcast_from_rank0",
)  # fmt: skip
"""Arguments that say how a model is cut. They mean nothing for one that stays whole."""


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
    for name in of_pieces:
        if name not in _OF_PIECES:
            raise TypeError(f"load_checkpoint_and_dispatch() got an unexpected keyword argument {name!r}")
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
    load_checkpoint_in_model(model, Path(checkpoint), strict=strict)
    return model.to(device=device, dtype=target)


def _cuts(device_map: Mapping[str, Any] | str | None) -> bool:
    if device_map is None:
        return False
    return isinstance(device_map, str) or set(device_map) != {""} or device_map[""] == "disk"


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"dtype={dtype!r} is no type of floating point numbers, as torch.bfloat16 is")
    return found
