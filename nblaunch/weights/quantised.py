"""Quantised weights: frozen low-bit numbers in a library's own format.

bitsandbytes  a subclass of ``Parameter`` that carries its scales; the state dict lists them as well, but a 4-bit module
              cannot load them, nor can an 8-bit module after its first forward
torchao       a ``Parameter`` whose tensor has a subclass

No optimizer changes quantised weights, so workers do not send them; the kernel's model already has them. GPTQ, AWQ
and similar formats keep integers in ordinary buffers and need no special treatment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_QUANTISED_MARKS = ("quant_state", "has_fp16_weights")  # attributes of bitsandbytes' parameters: 4-bit, 8-bit


def is_quantised_weight(parameter: Any) -> bool:
    """Return whether ``parameter`` is frozen and in the format of a quantisation library."""
    if parameter is None or parameter.requires_grad:
        return False
    if any(hasattr(parameter, mark) for mark in _QUANTISED_MARKS):
        return True
    return any(kind.__module__.partition(".")[0] == "torchao" for kind in type(parameter.data).__mro__)


def quantised_entries(module: Any, state: Mapping[str, Any]) -> dict[str, bool]:
    """Return the names in ``state``, a state dict of ``module``, that belong to quantised weights.

    Returns:
        Name -> whether it is the weight itself; False for the library's additional entries.
    """
    entries: dict[str, bool] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        quantised = {name for name, parameter in owner._parameters.items() if is_quantised_weight(parameter)}
        if not quantised:
            continue
        prefix = f"{path}." if path else ""
        others = {*owner._parameters, *owner._buffers} - quantised
        children = tuple(f"{name}." for name in owner._modules)
        for name in state:
            short = name.removeprefix(prefix)
            if name.startswith(prefix) and short not in others and not short.startswith(children):
                entries[name] = short in quantised
    return entries
