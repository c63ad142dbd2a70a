"""Models that lie on their devices before they are prepared: cut by a device map, or quantised where they stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from nblaunch.training.joining import JoinedProcess
from nblaunch.wire import quantised

_HOST = ("cpu", "disk")


def device_map(model: torch.nn.Module) -> Mapping[str, Any]:
    """Return the device map that ``model``, or a module in it, was loaded with; empty where there is none.

    transformers and Accelerate leave it as ``hf_device_map``: name of a module -> device, or ``"disk"``. Of several,
    the one with the most entries.
    """
    maps = (module.__dict__.get("hf_device_map") for module in model.modules())
    return max((found for found in maps if isinstance(found, Mapping)), key=len, default={})


def is_dispatched(model: torch.nn.Module) -> bool:
    """Return whether a device map has cut ``model`` into pieces."""
    return len(device_map(model)) > 1


def is_quantised(model: torch.nn.Module) -> bool:
    """Return whether ``model`` has quantised weights, of whichever library."""
    marks = ("is_quantized", "is_loaded_in_8bit", "is_loaded_in_4bit")  # transformers' models
    if any(module.__dict__.get(mark) for module in model.modules() for mark in marks):
        return True
    return any(quantised.is_quantised(parameter) for parameter in model.parameters())


def stays_in_place(model: torch.nn.Module, process: JoinedProcess) -> bool:
    """Return whether ``model`` stays where it is when it is prepared, instead of moving to this rank's device.

    Raises:
        ValueError: it can't be trained from where it is.
    """
    if is_dispatched(model) and process.topology.world_size > 1:
        raise ValueError(
            "You can't train a model that has been loaded with `device_map='auto'` in any distributed mode: every rank "
            f"needs the whole model on its own device, and hf_device_map has {len(device_map(model))} entries. Load it "
            'with device_map={"": accelerator.device} inside the function, shard it with '
            "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin()), or use num_processes=1"
        )
    if not is_quantised(model):
        return is_dispatched(model)
    placed = {str(place) for place in device_map(model).values()}
    if process.device.type != "cpu" and placed & set(_HOST):
        raise ValueError(
            "You can't train a model that has been loaded in 8-bit or 4-bit precision with CPU or disk offload: "
            f'hf_device_map has {", ".join(sorted(placed))}. Load it with device_map={{"": accelerator.device}}'
        )
    for parameter in model.parameters():
        if not is_dispatched(model) and quantised.is_quantised(parameter):
            _check_device(parameter.device, process.device, is_fixed=bool(placed))
    return bool(placed) or all(parameter.device == process.device for parameter in model.parameters())


def _check_device(held: torch.device, wanted: torch.device, is_fixed: bool) -> None:
    if is_fixed and held.type != "meta" and held != wanted:
        raise ValueError(
            "You can't train a model that has been loaded in 8-bit or 4-bit precision on a different device than the "
            f"one you're training on: it is on {held}, and this rank trains on {wanted}. Load it inside the function "
            'with device_map={"": accelerator.device}, or on the CPU in the notebook and without a device_map'
        )
