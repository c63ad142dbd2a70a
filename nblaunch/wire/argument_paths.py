"""Torch modules, optimizers and learning rate schedulers in the arguments of a call, by argument paths that kernel and
workers have in common.

The search covers the arguments themselves, and what lists, tuples, dicts and objects of the user's classes among them
hold. It lists each module once, by the first path that leads to it. It leaves out a module inside another one that it
lists, since the outer module's weights include the inner one's.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

ArgPath = int | str
"""An argument path: an argument's position, or the way to what is inside one: ``args[0]['generator']``."""

_MAX_DEPTH = 4
_MAX_ITEMS = 1000
"""A container that holds more items is taken for data, and is not searched."""
_MAX_OBJECTS = 20_000
"""Objects that are looked at in one call."""
_WITHOUT_MODULES = frozenset(
    {"builtins", "functools", "logging", "nblaunch", "numpy", "pandas", "threading", "torch", "types"}
)
"""Packages whose objects are not looked into."""


def modules_in(args: Sequence[Any]) -> dict[ArgPath, Any]:
    """Return the modules in ``args`` by their argument paths, in order. Imports nothing, torch included."""
    torch: Any = sys.modules.get("torch")
    found = _objects_in(args, torch.nn.Module) if torch is not None else {}
    return found if len(found) < 2 else _outermost(found)


def optimizers_in(args: Sequence[Any]) -> dict[ArgPath, Any]:
    """Return the optimizers in ``args`` and their schedulers, each once, as :func:`modules_in` does.

    All paths are texts. A scheduler goes on from the learning rates of its optimizer, and is left out where that is not
    in ``args``.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    once: dict[int, tuple[ArgPath, Any]] = {}
    for path, one in _objects_in(args, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)).items():
        once.setdefault(id(one), (path_name(path), one))
    return {path: one for path, one in once.values() if not is_scheduler(one) or id(one.optimizer) in once}


def is_scheduler(value: Any) -> bool:
    """Return whether one of :func:`optimizers_in` is a scheduler rather than an optimizer."""
    torch: Any = sys.modules["torch"]
    return isinstance(value, torch.optim.lr_scheduler.LRScheduler)


def _objects_in(args: Sequence[Any], kind: type | tuple[type, ...]) -> dict[ArgPath, Any]:
    found: dict[ArgPath, Any] = {}
    seen: set[int] = set()
    for position, arg in enumerate(args):
        if isinstance(arg, kind):
            found[position] = arg
        else:
            found.update(_inside(arg, f"args[{position}]", kind, _MAX_DEPTH, seen))
    return found


def modules_at(args: Sequence[Any], paths: Sequence[ArgPath]) -> dict[ArgPath, Any]:
    """Return the modules that :func:`modules_in` found at ``paths``, in any process, as far as they are in ``args``.

    An object may leave a module behind when it is pickled.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not paths:
        return {}
    if any(isinstance(path, str) for path in paths):
        found = modules_in(args)
    else:
        found = {path: args[path] for path in paths if isinstance(path, int)}
    return {path: found[path] for path in paths if isinstance(found.get(path), torch.nn.Module)}


def optimizers_at(args: Sequence[Any], paths: Sequence[ArgPath]) -> dict[ArgPath, Any]:
    """Return the optimizers and schedulers that :func:`optimizers_in` found at ``paths``; see :func:`modules_at`."""
    if not paths:
        return {}
    found = optimizers_in(args)
    return {path: found[path] for path in paths if path in found}


def path_name(path: ArgPath) -> str:
    """Return an argument path as text: ``args[1]``, ``args[0]['generator']``."""
    return path if isinstance(path, str) else f"args[{path}]"


def _inside(
    value: Any, name: str, kind: type | tuple[type, ...], depth: int, seen: set[int]
) -> Iterator[tuple[str, Any]]:
    if len(seen) > _MAX_OBJECTS:
        return
    seen.add(id(value))
    for step, part in _parts(value):
        # A proxy's own idea of its class may raise.
        if issubclass(type(part), kind):
            yield name + step, part
        elif depth > 1 and id(part) not in seen:
            yield from _inside(part, name + step, kind, depth - 1, seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield what a container holds, each with the step to it."""
    cls = type(value)
    if issubclass(cls, (list, tuple)):
        if len(value) <= _MAX_ITEMS:
            names = getattr(cls, "_fields", None)  # of a named tuple
            yield from ((f".{names[i]}" if names else f"[{i}]", part) for i, part in enumerate(value))
    elif issubclass(cls, dict):
        if len(value) <= _MAX_ITEMS:
            yield from ((_key(key, i), part) for i, (key, part) in enumerate(list(value.items())))
    elif dataclasses.is_dataclass(cls):
        names = (field.name for field in dataclasses.fields(cls))
        yield from ((f".{name}", getattr(value, name)) for name in names if hasattr(value, name))
    elif issubclass(cls, (SimpleNamespace, argparse.Namespace)):
        yield from ((f".{name}", part) for name, part in vars(value).items())
    elif cls.__module__.partition(".")[0] not in _WITHOUT_MODULES and not issubclass(cls, type):
        yield from ((f".{name}", part) for name, part in _attributes(value).items())


def _attributes(value: Any) -> dict[str, Any]:
    """Return what an object of a user's or a library's class has set on itself; a proxy's own code is not asked."""
    try:
        held = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return dict(held) if type(held) is dict and len(held) <= _MAX_ITEMS else {}


def _key(key: Any, index: int) -> str:
    """Return ``['name']``, or the number of the key where its text may differ between processes."""
    return f"[{key!r}]" if isinstance(key, (str, int, enum.Enum)) else f"[key {index}]"


def _outermost(found: dict[ArgPath, Any]) -> dict[ArgPath, Any]:
    """Return each module once, without modules that are parts of others."""
    parts = {id(part) for module in found.values() for part in module.modules() if part is not module}
    kept: dict[int, ArgPath] = {}
    for path, module in found.items():
        if id(module) not in parts:
            kept.setdefault(id(module), path)
    return {path: found[path] for path in kept.values()}
