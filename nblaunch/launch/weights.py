"""The trained weights of the modules in ``args``, on their way back into the kernel's own modules."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from nblaunch.launch.memory import size


def module_positions(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Positions of the torch modules in ``args`` that hold real weights. Imports nothing."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return ()
    return tuple(
        position
        for position, arg in enumerate(args)
        if isinstance(arg, torch.nn.Module) and not any(tensor.is_meta for tensor in arg.parameters())
    )


def trainable_bytes(module: Any) -> int:
    """Bytes of the module's parameters that training changes."""
    return sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)


def load_back(args: tuple[Any, ...], weights: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Load state dicts into the modules they belong to; returns one line for the person about each."""
    return [_load_one(args[position], position, state) for position, state in weights.items()]


def _load_one(module: Any, position: int, state: Mapping[str, Any]) -> str:
    name = f"args[{position}] ({type(module).__name__})"
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        # The workers' module has another shape than the kernel's (layers added, embeddings resized).
        reason = " ".join(str(error).split())
        return f"the trained weights of {name} do not fit the kernel's module and were not loaded: {reason[:300]}"
    num_bytes = sum(
        tensor.numel() * tensor.element_size() for tensor in state.values() if hasattr(tensor, "numel")
    )
    return f"the trained weights of {name} are back in the kernel's module ({size(num_bytes)})"
