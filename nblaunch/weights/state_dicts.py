"""State dicts: the versions that torch stores with them, and whether a module can load one.

:func:`shape_mismatches` and :func:`special_prefixes` predict what ``load_state_dict`` would reject, because it loads
all that fits before it raises. :func:`give_own_memory` prepares a module's tensors so that values can be copied into
them.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any


def versions_of(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the module versions that torch stores with a state dict; None if there are none.

    Modules read them when they load the state dict. A plain copy of the dict loses them.
    """
    return getattr(state, "_metadata", None)


def with_versions(entries: Mapping[str, Any], versions: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a state dict of ``entries`` with the ``versions`` of another state dict of the same modules."""
    state: OrderedDict[str, Any] = OrderedDict(entries)
    if versions is not None:
        state._metadata = versions  # type: ignore[attr-defined]
    return state


def special_prefixes(module: Any) -> Iterator[str]:
    """Yield the state dict prefixes of parts of ``module`` that may rename or reshape the entries that they load."""
    base: Any = sys.modules["torch"].nn.Module
    for name, part in module.named_modules():
        if (
            type(part)._load_from_state_dict is not base._load_from_state_dict
            or type(part).load_state_dict is not base.load_state_dict
            or not all(
                getattr(hook, "keeps_names_and_shapes", False)
                for hook in part._load_state_dict_pre_hooks.values()
            )
        ):
            yield f"{name}." if name else ""


def shape_mismatches(
    module: Any, current: Mapping[str, Any], saved: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Yield the names of tensors that ``module`` can't load from ``saved``, with their shapes in both.

    Parts that accept other shapes are left out: modules with their own loading code (such as observers of
    quantisation-aware training), parameters of lazy layers, and the result of ``get_extra_state()``.

    Args:
        module: the module that will load ``saved``.
        current: state dict of the module.
        saved: another state dict, of tensors or placeholders.
    """
    torch: Any = sys.modules["torch"]
    special = tuple(special_prefixes(module))
    for name, value in current.items():
        if name.startswith(special) or name.endswith(torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX):
            continue
        here, there = _shape(value), _shape(saved.get(name))
        if here is not None and there is not None and here != there:
            yield name, here, there


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the shape of a value; None if it has none, and for parameters of lazy layers, which accept any shape."""
    is_lazy = sys.modules["torch"].nn.parameter.is_lazy(value)
    return None if is_lazy or not hasattr(value, "shape") else tuple(value.shape)


def give_own_memory(module: Any) -> None:
    """Give each parameter and buffer whose elements share memory, for example after ``expand``, its own memory.

    Neither the weights of rank 0 nor weights from a file can be copied into such a tensor. The object and its names
    stay the same.
    """
    for tensor in [*module.parameters(), *module.buffers()]:
        if _overlaps(tensor):
            tensor.data = tensor.detach().clone(memory_format=sys.modules["torch"].contiguous_format)


def _overlaps(tensor: Any) -> bool:
    """Return whether a tensor has more elements than its memory holds."""
    torch: Any = sys.modules["torch"]
    is_plain = type(tensor.data) is torch.Tensor and tensor.layout is torch.strided
    if not is_plain or torch.nn.parameter.is_lazy(tensor) or tensor.is_inference():
        return False
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return bool(sum((size - 1) * stride for size, stride in steps) + 1 < tensor.numel())
