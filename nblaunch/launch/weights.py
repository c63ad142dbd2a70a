"""The trained weights of the modules in ``args``, on their way back into the kernel's own modules."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from nblaunch import in_words
from nblaunch.wire.pieces import Piece, Pieces


def module_positions(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Positions of the torch modules in ``args``. Imports nothing."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return ()
    return tuple(position for position, arg in enumerate(args) if isinstance(arg, torch.nn.Module))


def trainable_bytes(module: Any) -> int:
    """Bytes of the module's parameters that training changes, of those that have values here."""
    torch: Any = sys.modules["torch"]
    with_values = (p for p in module.parameters() if not (torch.nn.parameter.is_lazy(p) or p.is_meta))
    return sum(p.numel() * p.element_size() for p in with_values if p.requires_grad)


def join(told: Sequence[Mapping[int, Mapping[str, Any]]]) -> dict[int, dict[str, Any]]:
    """State dicts from what every rank told, by position: tensors as they are, parts of one as :class:`Pieces`."""
    joined: dict[int, dict[str, Any]] = {}
    for one in told:
        for position, state in one.items():
            names = joined.setdefault(position, {})
            for name, value in state.items():
                if isinstance(value, Piece):
                    value = Pieces([*(names[name].parts if name in names else ()), value])
                names[name] = value
    return joined


def assembled(state: Mapping[str, Any]) -> dict[str, Any]:
    """``state`` with whole tensors."""
    return {name: value.assembled() if isinstance(value, Pieces) else value for name, value in state.items()}


def load_back(
    args: tuple[Any, ...], weights: Mapping[int, Mapping[str, Any]], lost: Mapping[int, str]
) -> tuple[list[str], set[int]]:
    """Load state dicts into the modules they belong to; returns a line for the person about each, and which are in.

    Args:
        args: with the modules.
        weights: position in ``args`` -> state dict, whose tensors may be :class:`Pieces`.
        lost: position -> what of the state dict did not come through, or why none of it did.
    """
    lines, loaded = [], set()
    for position in sorted({*weights, *lost}):
        line, is_loaded = _load_one(args[position], position, weights.get(position), lost.get(position, ""))
        lines.append(line)
        if is_loaded:
            loaded.add(position)
    return lines, loaded


def _load_one(module: Any, position: int, state: Mapping[str, Any] | None, lost: str) -> tuple[str, bool]:
    name = f"args[{position}] ({type(module).__name__})"
    if state is None:
        return f"the trained weights of {name} can't be had in the kernel: {lost}", False
    misfit = _misfit(module, state, is_whole=not lost)
    if not misfit:
        try:
            _load(module, state, is_whole=not lost)
        except RuntimeError as error:  # the module's own code refuses
            misfit = " ".join(str(error).split())
    if misfit:
        return (
            f"the trained weights of {name} do not fit the kernel's module and were not loaded ({misfit[:300]}); "
            f"they are in job.weights()[{position}]"
        ), False
    num_bytes = sum(
        tensor.numel() * tensor.element_size() for tensor in state.values() if hasattr(tensor, "numel")
    )
    without = f", without what can't be pickled: {lost}" if lost else ""
    return (
        f"the trained weights of {name} are back in the kernel's module ({in_words.size(num_bytes)}{without})",
        True,
    )


def _load(module: Any, state: Mapping[str, Any], is_whole: bool) -> None:
    """Put ``state`` into ``module``; parts of tensors go to their places one by one, without a whole copy of them."""
    torch: Any = sys.modules["torch"]
    own = module.state_dict()
    bare = {name for name, tensor in own.items() if getattr(tensor, "is_meta", False)}
    with torch.no_grad():
        for name, value in state.items():
            if isinstance(value, Pieces) and name not in bare:
                value.put_into(own[name])
    in_parts = {name for name, value in state.items() if isinstance(value, Pieces)}
    plain = {name: value for name, value in state.items() if name not in in_parts | bare}
    module.load_state_dict(plain, strict=is_whole and not in_parts | bare)
    if bare:
        module.load_state_dict(_made(module, state, bare), strict=False, assign=True)


def _made(module: Any, state: Mapping[str, Any], bare: set[str]) -> dict[str, Any]:
    """Tensors in place of those of ``module`` that have a shape only; parameters that were one stay one."""
    torch: Any = sys.modules["torch"]
    parameters = dict(module.named_parameters(remove_duplicate=False))
    made: dict[int, Any] = {}
    tensors = {}
    for name in bare & state.keys():
        value = state[name]
        parameter = parameters.get(name)
        tensor = made.get(id(parameter)) if parameter is not None else None
        if tensor is None:
            tensor = value.assembled() if isinstance(value, Pieces) else value
            if parameter is not None:
                tensor = torch.nn.Parameter(tensor, requires_grad=parameter.requires_grad)
                made[id(parameter)] = tensor
        tensors[name] = tensor
    return tensors


def _misfit(module: Any, state: Mapping[str, Any], is_whole: bool) -> str:
    """How the workers' module differs from the kernel's (layers added, embeddings resized); empty if it fits.

    Looked at beforehand, because ``load_state_dict`` loads what fits before it raises for the rest.
    """
    own = module.state_dict()
    reasons = [f"{name} is only there" for name in state if name not in own]
    reasons += [f"{name} is only here" for name in own if name not in state and is_whole]
    reasons += [
        f"{value.num_missing:,} elements of {name} are on other machines"
        for name, value in state.items()
        if isinstance(value, Pieces) and value.num_missing
    ]
    reasons += [
        f"{name} is {tuple(state[name].shape)} there and {tuple(tensor.shape)} here"
        for name, tensor in own.items()
        if name in state and _has_shape(tensor) and tensor.shape != state[name].shape
    ]
    return "; ".join(reasons)


def _has_shape(value: Any) -> bool:
    torch: Any = sys.modules["torch"]
    return isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value)
