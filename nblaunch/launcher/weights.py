"""Loads the trained weights of modules in a call's arguments back into the kernel's modules.

A state dict may hold :class:`ShardedTensor` for tensors that arrived in shards, and :class:`Unchanged` for tensors that
no worker changed. The counterpart for files is :mod:`nblaunch.training.checkpoints.load_weights`.

This file also describes torch modules that the function uses but does not receive as arguments. Their weights are not
collected.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nblaunch import formatting, packages
from nblaunch.events import Note
from nblaunch.host import signal_handlers
from nblaunch.user_code import used_by
from nblaunch.weights import (
    ShardedTensor,
    TensorShard,
    give_own_memory,
    is_quantised_weight,
    shape_mismatches,
    special_prefixes,
    versions_of,
    with_versions,
    without_wrappers_inside,
)
from nblaunch.wire.argument_paths import ArgPath, path_name
from nblaunch.wire.originals import Unchanged

_MAX_NAMED = 3  # modules in one line


def merge_ranks(sent: Sequence[Mapping[ArgPath, Mapping[str, Any]]]) -> dict[ArgPath, dict[str, Any]]:
    """Merge the ranks' states into state dicts by argument path, with a :class:`ShardedTensor` per sharded tensor."""
    joined: dict[ArgPath, dict[str, Any]] = {}
    for states in sent:
        for path, state in states.items():
            names = joined.setdefault(path, {})
            for name, value in state.items():
                if not isinstance(value, TensorShard):
                    names[name] = value
                    continue
                shards = names[name].shards if name in names else ()
                # If there are several machines, each sends its own shards, and two machines may send the same shard.
                if (value.offset, value.data.shape) not in {
                    (shard.offset, shard.data.shape) for shard in shards
                }:
                    names[name] = ShardedTensor([*shards, value])
    return joined


def assembled(state: Mapping[str, Any], module: Any) -> dict[str, Any]:
    """Return ``state`` with full tensors; tensors that were not sent are copied from the kernel's ``module``."""
    current = without_wrappers_inside(module).state_dict()
    full = {
        name: current[name].detach().clone() if isinstance(value, Unchanged) else _whole(value)
        for name, value in state.items()
    }
    return with_versions(full, versions_of(current))


def load_back(
    modules: Mapping[ArgPath, Any],
    weights: Mapping[ArgPath, Mapping[str, Any]],
    lost: Mapping[ArgPath, str],
    what: str = "trained weights",
    elsewhere: Mapping[ArgPath, Sequence[int]] = MappingProxyType({}),
) -> tuple[set[ArgPath], list[Note]]:
    """Load state dicts into their modules.

    Args:
        modules: the kernel's modules, by argument path.
        weights: argument path -> state dict, whose tensors may be :class:`ShardedTensor`.
        lost: argument path -> which part of the state dict was lost, or the reason why the whole state dict was lost.
        what: name of these weights in the note.
        elsewhere: argument path -> the ranks that changed the module, for modules whose weights none of these ranks
            sent; their changes are lost.

    Returns:
        The paths of the modules that now have the trained weights, and notes about all modules. Missing or incomplete
        weights are reported as warnings.
    """
    back: list[ArgPath] = []
    unchanged: list[ArgPath] = []
    warnings: list[str] = []
    for path, module in modules.items():
        state = weights.get(path)
        if state is None:
            continue
        misfit = _load_if_it_fits(module, state, is_complete=path not in lost)
        if misfit:
            warnings.append(
                f"the trained weights of {_name(module, path)} do not fit the kernel's module and were not "
                f"loaded ({misfit}); last_job().weights()[{path!r}], or the session's weights(), has them"
            )
        else:
            (back if _has_changes(state) else unchanged).append(path)
    known_unchanged = [path for path in unchanged if path not in lost and path not in elsewhere]
    copied = [path for path in back if path not in elsewhere]
    lines = []
    if copied:
        size = formatting.size(sum(_num_bytes(weights[path]) for path in copied))
        lines.append(f"copied {what} into {listed(modules, copied)}: {size}")
    if known_unchanged:
        lines.append(f"the weights of {listed(modules, known_unchanged)} were not changed by the workers")
    notes = [*map(Note.of_job, lines), *(Note.of_job(text, "warning") for text in warnings)]
    notes += [*notes_of_lost(modules, weights, lost), *_notes_of_elsewhere(modules, elsewhere)]
    return {*back, *unchanged}, notes


def notes_of_lost(
    modules: Mapping[ArgPath, Any], weights: Mapping[ArgPath, Mapping[str, Any]], lost: Mapping[ArgPath, str]
) -> list[Note]:
    """Return warnings about weights that were lost completely or in part; see :func:`load_back`."""
    paths_by_reason: dict[tuple[str, str], list[ArgPath]] = {}
    for path, reason in lost.items():
        quantity = "some " if path in weights else ""
        paths_by_reason.setdefault((quantity, reason), []).append(path)
    return [
        Note.of_job(
            f"{quantity}trained weights of {listed(modules, paths)} could not be copied back: {reason}. The return "
            "value and the logs are kept. Save the weights inside the function, for example with "
            "accelerator.save_model(), and pass sync_weights=False so that none are sent",
            "warning",
        )
        for (quantity, reason), paths in paths_by_reason.items()
    ]


def notes_of_detached(
    modules: Mapping[ArgPath, Any],
    full: Mapping[ArgPath, Mapping[str, Any]],
    lost: Mapping[ArgPath, str],
    elsewhere: Mapping[ArgPath, Sequence[int]],
) -> list[Note]:
    """Return notes about the weights that are kept for a detached job; see :func:`load_back`."""
    text = f"kept the trained weights of {listed(modules, list(full))}: job.load_weights(model) loads them"
    notes = [*([Note.of_job(text)] if full else []), *notes_of_lost(modules, full, lost)]
    return [*notes, *_notes_of_elsewhere(modules, elsewhere)]


def _notes_of_elsewhere(
    modules: Mapping[ArgPath, Any], elsewhere: Mapping[ArgPath, Sequence[int]]
) -> list[Note]:
    """Return warnings about modules that ranks have trained separately, such as one model on each rank."""
    paths_by_ranks: dict[tuple[int, ...], list[ArgPath]] = {}
    for path, ranks in elsewhere.items():
        paths_by_ranks.setdefault(tuple(ranks), []).append(path)
    paths_by_ranks.pop((), None)
    return [
        Note.of_job(
            f"{listed(modules, paths)} changed only on {formatting.ranks(ranks)}, but the weights come from another "
            "rank, where nothing has changed them. To train a model on each rank, return its state_dict() and launch "
            "with return_all=True",
            "warning",
        )
        for ranks, paths in paths_by_ranks.items()
    ]


def load_into(module: Any, path: ArgPath, state: Mapping[str, Any]) -> None:
    """Load a state dict, which must be complete, into ``module``.

    Raises:
        ValueError: the state does not fit; nothing was loaded.
    """
    import torch  # imported here, because this process may not have imported torch if it only followed the job

    if not isinstance(module, torch.nn.Module):
        raise ValueError(
            f"{type(module).__name__} is not a torch.nn.Module, so weights can't be loaded into it"
        )
    with signal_handlers.held_back():  # an interrupt would leave the module with only part of the weights
        misfit = _load_if_it_fits(module, state, is_complete=True)
    if misfit:
        raise ValueError(
            f"the trained weights of {path_name(path)} do not fit this {type(module).__name__}: {misfit}"
        )


def listed(modules: Mapping[ArgPath, Any], paths: Sequence[ArgPath]) -> str:
    """Return the names and classes of modules as one line of text."""
    return formatting.first([_name(modules[path], path) for path in paths], _MAX_NAMED)


def _name(module: Any, path: ArgPath) -> str:
    return f"{path_name(path)} ({type(module).__name__})"


def _num_bytes(state: Mapping[str, Any]) -> int:
    return sum(
        tensor.numel() * tensor.element_size() for tensor in state.values() if hasattr(tensor, "numel")
    )


def describe_uncollected_modules(function: Callable[..., Any], name: str) -> str:
    """Describe the notebook's modules that a function uses but does not receive as arguments.

    Workers train such a module like any other, but its weights are not collected and are lost when the workers end.

    Args:
        function: the function that the workers ran.
        name: name by which the user knows the function.

    Returns:
        A sentence; empty if there is no such module.
    """
    modules = _modules(function)
    if not modules:
        return ""
    named = formatting.joined([f"{where} ({type(module).__name__})" for where, module in modules.items()])
    verb, them = ("was", "it") if len(modules) == 1 else ("were", "them")
    return (
        f"{name} used {named} from the notebook, which {verb} not in args, so the workers' changes to {them} "
        f"are lost. To get trained weights, give the function a parameter, and pass the model as its argument: "
        f"notebook_launcher({name.rpartition('.')[2]}, (model,))"
    )


def _modules(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the trainable modules that ``function`` refers to, each once, under the name that it uses."""
    modules: dict[str, Any] = {}
    for where, value in used_by(function):
        is_module = packages.is_subclass(type(value), "torch.nn.Module")
        if not is_module or any(value is other for other in modules.values()):
            continue
        if any(parameter.requires_grad for parameter in value.parameters()):
            modules[where] = value
    return modules


# --- loading into one module, if the weights fit it -----------------------------------------------------------------


def _load_if_it_fits(module: Any, state: Mapping[str, Any], is_complete: bool) -> str:
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


def _has_changes(state: Mapping[str, Any]) -> bool:
    """Return whether ``state`` contains weights that the kernel does not have."""
    return not all(isinstance(value, Unchanged) for value in state.values())


def _whole(value: Any) -> Any:
    """Return the full tensor of an entry that may have arrived in shards."""
    return value.assembled() if isinstance(value, ShardedTensor) else value


def _load(module: Any, state: Mapping[str, Any], is_complete: bool) -> None:
    """Load ``state`` into ``module``; copy sharded tensors shard by shard, without assembling them.

    Unchanged tensors are skipped: copying them would take time, and memory if their pages belong to a file. Modules
    with their own loading code get all of their tensors, unsharded.
    """
    if not _has_changes(state):
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
        name: current[name] if isinstance(value, Unchanged) else _whole(value)
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
            tensor = _whole(value)
            if parameter is not None:
                tensor = torch.nn.Parameter(tensor, requires_grad=parameter.requires_grad)
                made[id(parameter)] = tensor
        tensors[name] = tensor
    return tensors


def _misfit(module: Any, state: Mapping[str, Any], is_complete: bool) -> str:
    """Return how the workers' module differs from the kernel's (layers added, embeddings resized); empty if it fits.

    The comparison comes first, because ``load_state_dict`` loads the entries that fit before it raises an error.
    Modules with their own loading code are not compared: for example, observers for quantisation-aware training accept
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
        f"{name} is {there} in the worker but {here} in the kernel"
        for name, here, there in shape_mismatches(module, current, state)
    ]
    return formatting.first(reasons, _MAX_NAMED, "; ")
