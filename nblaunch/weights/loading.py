"""Load the weights that workers sent into the kernel's module, if they fit it.

The state dict may hold :class:`ShardedTensor` for tensors that arrived in shards, and :class:`Unchanged` for tensors
that no worker changed. Its counterpart for files is :mod:`nblaunch.training.checkpoints.load_weights`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from nblaunch.weights.sharded import ShardedTensor
from nblaunch.weights.state_dicts import (
    give_own_memory,
    is_quantised_weight,
    shape_mismatches,
    special_prefixes,
    versions_of,
    with_versions,
    without_wrappers_inside,
)
from nblaunch.wire.originals import Unchanged


def load_if_it_fits(module: Any, state: Mapping[str, Any], is_complete: bool) -> str:
    """Load a state dict into ``module``; return why that is impossible, or an empty string."""
    # Quantised weights are never sent.
    is_complete = is_complete and not any(map(is_quantised_weight, module.parameters()))
    try:
        misfit = _misfit(module, state, is_complete)
        if not misfit:
            _load(module, state, is_complete)
    except Exception as error:  # raised by the module's own code
        misfit = " ".join(f"{type(error).__name__}: {error}".split())
    return misfit[:300]


def has_changes(state: Mapping[str, Any]) -> bool:
    """Return whether ``state`` contains weights that the kernel does not have."""
    return not all(isinstance(value, Unchanged) for value in state.values())


def whole(value: Any) -> Any:
    """Return the full tensor of an entry that may have arrived in shards."""
    return value.assembled() if isinstance(value, ShardedTensor) else value


def _load(module: Any, state: Mapping[str, Any], is_complete: bool) -> None:
    """Load ``state`` into ``module``; copy sharded tensors shard by shard, without assembling them.

    Unchanged tensors are skipped: copying them would take time, and memory if their pages belong to a file. Modules
    with their own loading code get all of their tensors, unsharded.
    """
    if not has_changes(state):
        return
    torch: Any = sys.modules["torch"]
    module = without_wrappers_inside(module)
    give_own_memory(module)
    current = module.state_dict()
    bare = {name for name, tensor in current.items() if getattr(tensor, "is_meta", False)}
    special = tuple(special_prefixes(module))
    handled = {
        name
        for name, value in state.items()
        if isinstance(value, (ShardedTensor, Unchanged)) and not name.startswith(special)
    } | bare
    with torch.no_grad():
        for name in handled - bare:
            if isinstance(state[name], ShardedTensor):
                state[name].put_into(current[name])
    plain = {
        name: current[name] if isinstance(value, Unchanged) else whole(value)
        for name, value in state.items()
        if name not in handled
    }
    module.load_state_dict(with_versions(plain, versions_of(current)), strict=is_complete and not handled)
    if bare:
        made = with_versions(_made(module, state, bare), versions_of(current))
        module.load_state_dict(made, strict=False, assign=True)


def _made(module: Any, state: Mapping[str, Any], bare: set[str]) -> dict[str, Any]:
    """Return tensors that replace ``module``'s meta tensors, which have only a shape; shared parameters stay shared."""
    torch: Any = sys.modules["torch"]
    parameters = dict(module.named_parameters(remove_duplicate=False))
    made: dict[int, Any] = {}
    tensors = {}
    for name in bare & state.keys():
        value = state[name]
        if isinstance(value, Unchanged):
            continue
        parameter = parameters.get(name)
        tensor = made.get(id(parameter)) if parameter is not None else None
        if tensor is None:
            tensor = whole(value)
            if parameter is not None:
                tensor = torch.nn.Parameter(tensor, requires_grad=parameter.requires_grad)
                made[id(parameter)] = tensor
        tensors[name] = tensor
    return tensors


def _misfit(module: Any, state: Mapping[str, Any], is_complete: bool) -> str:
    """Return how the workers' module differs from the kernel's (layers added, embeddings resized); empty if it fits.

    The comparison comes first, because ``load_state_dict`` loads the entries that fit before it raises for the rest.
    Modules with their own loading code are not compared: for example, observers of quantisation-aware training accept
    other shapes.
    """
    module = without_wrappers_inside(module)
    special, current = tuple(special_prefixes(module)), module.state_dict()
    only_there = [name for name in state if name not in current and not name.startswith(special)]
    only_here = [name for name in current if name not in state and not name.startswith(special)]
    reasons = [f"{name} exists only in the worker" for name in only_there]
    reasons += [f"{name} exists only in the kernel" for name in only_here if is_complete]
    reasons += [
        f"{value.num_missing:,} elements of {name} are on other machines"
        for name, value in state.items()
        if isinstance(value, ShardedTensor) and value.num_missing
    ]
    reasons += [
        f"{name} is {there} in the worker and {here} in the kernel"
        for name, here, there in shape_mismatches(module, current, state)
    ]
    return "; ".join(reasons)
