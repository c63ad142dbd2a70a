"""Small helpers that scripts for Hugging Face Accelerate import from its ``utils``."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any

from torch import nn

from nblaunch.training.models import is_compiled_module, repeated_blocks
from nblaunch.weights.sharded import is_sharded_model

_UNITS = ("bytes", "KB", "MB", "GB", "TB", "PB")


def convert_bytes(size: float) -> str:
    """Return a number of bytes in the largest fitting unit of 1024 and its powers: ``"1.5 GB"``."""
    whole = max(int(size), 1)
    power = min((whole.bit_length() - 1) // 10, len(_UNITS) - 1)
    scaled = size / 1024**power if power else size
    return f"{round(scaled, 2)} {_UNITS[power]}"


def get_pretty_name(obj: Any) -> str:
    """Return the name of a class or function, or that of an object's class."""
    named = obj if hasattr(obj, "__qualname__") or hasattr(obj, "__name__") else type(obj)
    return str(getattr(named, "__qualname__", None) or named.__name__)


def merge_dicts(source: Mapping[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Put the items of ``source`` into ``destination``, nested dicts into those of the same key, and return it."""
    pending: list[tuple[Mapping[Any, Any], dict[Any, Any]]] = [(source, destination)]
    while pending:
        given, merged = pending.pop()
        nested = {key: items for key, items in given.items() if isinstance(items, dict)}
        merged.update((key, item) for key, item in given.items() if key not in nested)
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
    """Compile the repeated blocks of ``module`` in place, or all of it where it has none, and return it.

    Modules keep their hooks and names, so that they can be sharded afterwards.

    Args:
        module: not sharded yet.
        **compile_kwargs: of :func:`torch.compile`.
    """
    for block in repeated_blocks(module) or [module]:
        block.compile(**compile_kwargs)
    return module
