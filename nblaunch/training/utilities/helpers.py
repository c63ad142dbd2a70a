"""Small helpers and constants that scripts for Hugging Face Accelerate import from its ``utils``."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from functools import reduce
from typing import Any

import torch
from torch import nn

from nblaunch import env
from nblaunch.errors import warn
from nblaunch.spec import DEFAULT_PORTS
from nblaunch.training.collectives.nested import find_batch_size
from nblaunch.training.models import is_compiled_module, repeated_blocks
from nblaunch.weights import is_sharded_model

# For each feature, the oldest version that has it, for comparisons in scripts.
FSDP_PYTORCH_VERSION = "2.1.0.a0+32f93b1"  # a version in NVIDIA's images, before the release
FSDP2_PYTORCH_VERSION = "2.6.0"
DTENSOR_PYTORCH_VERSION = "2.5.0"
BETA_TP_AVAILABLE_PYTORCH_VERSION = "2.3.0"
BETA_TP_AVAILABLE_TRANSFORMERS_VERSION = "4.52.0"
BETA_CP_AVAILABLE_PYTORCH_VERSION = "2.6.0"
BETA_SP_AVAILABLE_DEEPSPEED_VERSION = "0.18.2"
XPU_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.4.0"
MITA_PROFILING_AVAILABLE_PYTORCH_VERSION = "2.1.0"

TORCH_DYNAMO_MODES = ["default", "reduce-overhead", "max-autotune"]

_UNITS = ("bytes", "KB", "MB", "GB", "TB", "PB")


def convert_bytes(size: float) -> str:
    """Return a number of bytes as text, in the largest power of 1024 that fits: ``"1.5 GB"``."""
    whole = max(int(size), 1)
    power = min((whole.bit_length() - 1) // 10, len(_UNITS) - 1)
    scaled = size / 1024**power if power else size
    return f"{round(scaled, 2)} {_UNITS[power]}"


def get_pretty_name(obj: Any) -> str:
    """Return the name of a class or function, or of an object's class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def merge_dicts(source: Mapping[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Merge ``source`` into ``destination``, recursively for nested dicts, and return ``destination``."""
    pending: list[tuple[Mapping[Any, Any], dict[Any, Any]]] = [(source, destination)]
    while pending:
        added, merged = pending.pop()
        nested = {key: items for key, items in added.items() if isinstance(items, dict)}
        merged.update((key, item) for key, item in added.items() if key not in nested)
        pending += [(items, merged.setdefault(key, {})) for key, items in nested.items()]
    return destination


def recursive_getattr(obj: Any, attr: str) -> Any:
    """Return ``obj.a.b`` for ``attr="a.b"``."""
    return reduce(getattr, attr.split("."), obj)


def model_has_dtensor(model: nn.Module) -> bool:
    """Return whether ranks hold shards of the parameters of ``model``."""
    return is_sharded_model(model)


def has_compiled_regions(module: nn.Module) -> bool:
    """Return whether parts of ``module``, but not the whole, are compiled."""
    parts = [part for part in module.modules() if part is not module]
    return not is_compiled_module(module) and any(map(_is_compiled, parts))


def _is_compiled(module: nn.Module) -> bool:
    return is_compiled_module(module) or getattr(module, "_compiled_call_impl", None) is not None


def compile_regions_fsdp2(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile the repeated blocks of ``module`` in place, or the whole module if it has none; return ``module``.

    Modules keep their hooks and names, so they can be sharded afterwards.

    Args:
        module: a module that is not sharded yet.
        **compile_kwargs: options of :func:`torch.compile`.
    """
    for block in repeated_blocks(module) or [module]:
        block.compile(**compile_kwargs)
    return module


# --- tensors and modules ---------------------------------------------------------------------------------------------

_BYTES = {"bool": 1 / 8, "int2": 1 / 4, "int4": 1 / 2, "fp8": 1}
"""Sizes in bytes of types that are counted in bits, and of types that torch does not have."""


def dtype_byte_size(dtype: torch.dtype | str) -> float:
    """Return the size of one element of a dtype in bytes; also accepts ``"int2"``, ``"int4"`` and ``"fp8"``.

    Raises:
        ValueError: ``dtype`` is not a dtype.
    """
    name = str(getattr(dtype, "value", dtype)).removeprefix("torch.")
    if name in _BYTES:
        return _BYTES[name]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"{dtype!r} is not a dtype; valid values are torch's dtypes, 'int2', 'int4' and 'fp8'"
        )
    return dtype.itemsize


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return the device, address and size of the storage of ``tensor``: equal for tensors that share memory."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


def find_tied_parameters(model: nn.Module, **kwargs: Any) -> list[list[str]]:
    """Return the sorted names of each tied parameter; ``kwargs`` of older callers are ignored."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [sorted(several) for several in names.values() if len(several) > 1]


def ignorant_find_batch_size(data: Any) -> int | None:
    """Return the number of rows in the first tensor of nested ``data``; None if there is none."""
    try:
        return find_batch_size(data)
    except (TypeError, ValueError):
        return None


# --- the process and the machine -------------------------------------------------------------------------------------


def convert_dict_to_env_variables(current_env: Mapping[str, str]) -> list[str]:
    """Return ``NAME=value`` lines; warn about variables that are left out because a shell would misread them."""
    lines: list[str] = []
    left_out: list[str] = []
    for name, value in current_env.items():
        is_plain = name and value and not set(" ;<>\n") & set(name + value)
        (lines if is_plain else left_out).append(f"{name}={value}\n")
    if left_out:
        shown = ", ".join(repr(line[:-1]) for line in left_out)
        warn(f"left out, because they are empty or contain a space, a newline or one of ;<>: {shown}")
    return lines


def is_port_in_use(port: int | None = None) -> bool:
    """Return whether a process listens on a TCP port of ``localhost``; if ``port`` is None, on port 29500."""
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", DEFAULT_PORTS["static"] if port is None else port)) == 0


def are_libraries_initialized(*library_names: str) -> list[str]:
    """Return the names in ``library_names`` whose modules this process has imported."""
    return [name for name in library_names if name in sys.modules]


def check_cuda_fp8_capability() -> bool:
    """Return whether the current NVIDIA GPU computes in FP8 (compute capability 8.9); False without a GPU."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def enable_fsdp_ram_efficient_loading() -> None:
    """Make transformers load pretrained weights on rank 0 only; other ranks get them from ``prepare``."""
    env.apply({"ACCELERATE_USE_FSDP": "True", "FSDP_CPU_RAM_EFFICIENT_LOADING": "True"})


def disable_fsdp_ram_efficient_loading() -> None:
    """Make transformers load pretrained weights on every rank."""
    env.apply({"FSDP_CPU_RAM_EFFICIENT_LOADING": "False"})
