"""Models and their files as libraries look at them: sizes, tied parameters, names."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nblaunch import formatting
from nblaunch.training.checkpoints.model_files import read_weights, view_of
from nblaunch.wire.weights import is_sharded

# --- sizes ------------------------------------------------------------------------------------------------------------


def convert_file_size_to_int(size: int | str) -> int:
    """Return a size in bytes: ``"5GB"`` is 5 * 10**9, ``"5GiB"`` 5 * 2**30, a number is bytes already.

    Raises:
        ValueError: ``size`` is neither.
    """
    return formatting.parse_size(size)


def convert_bytes(size: float) -> str:
    """Return a number of bytes as text in units of 1024, as ``"1.5 KB"``."""
    for unit in ("bytes", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{round(size, 2)} {unit}"
        size /= 1024
    return f"{round(size, 2)} PB"


def dtype_byte_size(dtype: torch.dtype) -> float:
    """Return the bytes of one element; a bool counts one bit, as packed formats store it."""
    if dtype == torch.bool:
        return 1 / 8
    return dtype.itemsize


def compute_module_sizes(
    model: nn.Module,
    dtype: str | torch.dtype | None = None,
    special_dtypes: dict[str, str | torch.dtype] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of every tensor of a model and of every module, by name; ``""`` is the whole model.

    Args:
        model: also one on the meta device.
        dtype: count floating point tensors that are wider than this as if they had it.
        special_dtypes: types of single tensors, by name.
        buffers_only: leave parameters out.
    """
    narrow = None if dtype is None else _as_dtype(dtype)
    sizes: dict[str, int] = defaultdict(int)
    parameters = () if buffers_only else model.named_parameters()
    for name, tensor in chain(parameters, model.named_buffers()):
        element = dtype_byte_size(tensor.dtype)
        if special_dtypes and name in special_dtypes:
            element = dtype_byte_size(_as_dtype(special_dtypes[name]))
        elif narrow is not None and tensor.is_floating_point():
            element = min(element, dtype_byte_size(narrow))
        num_bytes = int(tensor.numel() * element)
        path = name.split(".")
        for depth in range(len(path) + 1):
            sizes[".".join(path[:depth])] += num_bytes
    return dict(sizes)


def _as_dtype(dtype: str | torch.dtype) -> torch.dtype:
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{dtype!r} is no type of torch's tensors")
    return found


# --- parameters and modules -------------------------------------------------------------------------------------------


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return what two tensors have in common where they share memory: device, storage and its size in bytes."""
    _, storage = view_of(tensor)
    return tensor.device, storage, tensor.untyped_storage().nbytes()


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the groups of names that one parameter has in a model, each sorted.

    Args:
        model: as it was built: what is moved or sharded later may not be tied any more.
        **kwargs: accepted for code that passes on more.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def get_module_class_from_name(module: nn.Module, name: str) -> type[nn.Module] | None:
    """Return the first class called ``name`` of a module or one inside it; None where there is none."""
    return next((type(found) for found in module.modules() if type(found).__name__ == name), None)


def get_parameters_from_modules(
    modules: Any, model: nn.Module, device: torch.device | str | None = None
) -> set[nn.Parameter]:
    """Return the parameters of some modules of a model, as wrappers that ignore them take them.

    Args:
        modules: the modules, or a regular expression that their whole names match; None: none.
        model: whose modules a regular expression is for.
        device: where the modules are brought; None: they stay.
    """
    if isinstance(modules, str):
        pattern = re.compile(modules)
        modules = [module for name, module in model.named_modules() if pattern.fullmatch(name)]
    chosen = list(modules or ())
    if device is not None:
        for module in chosen:
            module.to(device)
    return {parameter for module in chosen for parameter in module.parameters()}


def get_module_children_bottom_up(model: nn.Module, return_fqns: bool = False) -> list[Any]:
    """Return the modules of a model, each after those inside it; with ``return_fqns``, pairs of name and module."""
    found = sorted(model.named_modules(), key=lambda named: -len(_path(named[0])))
    return found if return_fqns else [module for _, module in found]


def _path(name: str) -> list[str]:
    return name.split(".") if name else []


def model_has_dtensor(model: nn.Module) -> bool:
    """Return whether a parameter of the model is a shard, a ``DTensor``."""
    return any(is_sharded(parameter) for parameter in model.parameters())


def get_pretty_name(obj: Any) -> str:
    """Return the name of a function or class, or that of an object's class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return an attribute of attributes: ``recursive_getattr(model, "encoder.layer")``."""
    for name in attr.split("."):
        obj = getattr(obj, name)
    return obj


# --- files ------------------------------------------------------------------------------------------------------------


def load_state_dict(
    checkpoint_file: str | os.PathLike[str], device_map: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return the state dict in a file of safetensors' or torch's format; nothing in it is executed.

    Args:
        checkpoint_file: one file, not an index.
        device_map: names of modules, ``""`` for the whole, and the devices of their tensors; None: CPU memory.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    weights = read_weights(Path(checkpoint_file))
    if device_map is None:
        return weights
    return {
        name: value.to(_device_of(name, device_map)) if isinstance(value, torch.Tensor) else value
        for name, value in weights.items()
    }


def _device_of(name: str, device_map: dict[str, Any]) -> Any:
    """Return the device of the innermost module that a device map names; the CPU for what goes to disk, or nowhere."""
    path = _path(name)
    for depth in range(len(path), -1, -1):
        device = device_map.get(".".join(path[:depth]))
        if device is not None:
            return "cpu" if device == "disk" else device
    return "cpu"


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state dict with tensors only, in one piece each, and one name per memory, as safetensors' files need."""
    kept: dict[Any, str] = {}
    cleaned = {}
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            continue
        view, _ = view_of(value)
        if view is None or kept.setdefault(view, name) == name:
            cleaned[name] = value.contiguous()
    return cleaned
