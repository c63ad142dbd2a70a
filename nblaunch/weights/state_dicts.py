"""State dicts: the versions torch keeps beside their entries, and whether a module can load one.

:func:`shape_mismatches` and :func:`special_prefixes` find beforehand what ``load_state_dict`` would refuse: it
loads all that fits before it raises. :func:`give_own_memory` makes a module's tensors ready to be copied into.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any


def versions_of(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the versions of modules that torch keeps beside the entries of a state dict; None if there are none.

    Modules look at them when they load it. A plain copy of the dict loses them.
    """
    return getattr(state, "_metadata", None)


def with_versions(entries: Mapping[str, Any], versions: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a state dict of ``entries`` with what :func:`versions_of` returned for another of the same modules."""
    state: OrderedDict[str, Any] = OrderedDict(entries)
    if versions is not None:
        state._metadata = versions  # type: ignore[attr-defined]
    return state


def special_prefixes(module: Any) -> Iterator[str]:
    """Yield the prefixes, in a state dict, of the parts of ``module`` that may rename or reshape what they load."""
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
    """Yield the names of tensors that ``module`` can't load from ``saved``, with their shapes in the module and there.

    Parts that accept other shapes are left out: modules that load in a way of their own (such as observers of
    quantisation-aware training), parameters of lazy layers, and what ``get_extra_state()`` returns.

    Args:
        module: the module that is to load ``saved``.
        current: its state dict.
        saved: another state dict, of tensors or what stands for them.
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
    """Return the shape of what has one; None for parameters of lazy layers, which take any."""
    is_lazy = sys.modules["torch"].nn.parameter.is_lazy(value)
    return None if is_lazy or not hasattr(value, "shape") else tuple(value.shape)


def give_own_memory(module: Any) -> None:
    """Give memory of its own to each parameter and buffer whose elements share memory, as ``expand`` returns them.

    Nothing can be copied into such a tensor, neither the weights of rank 0 nor weights from a file. It stays the same
    object, under all of its names.
    """
    for tensor in [*module.parameters(), *module.buffers()]:
        if _overlaps(tensor):
            tensor.data = tensor.detach().clone(memory_format=sys.modules["torch"].contiguous_format)


def _overlaps(tensor: Any) -> bool:
    """Return whether a tensor has more elements than its memory."""
    torch: Any = sys.modules["torch"]
    is_plain = type(tensor.data) is torch.Tensor and tensor.layout is torch.strided
    if not is_plain or torch.nn.parameter.is_lazy(tensor) or tensor.is_inference():
        return False
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return bool(sum((size - 1) * stride for size, stride in steps) + 1 < tensor.numel())
