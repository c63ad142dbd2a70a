"""Torch modules, optimizers and schedulers in a call's arguments, with paths that are the same in kernel and workers.

The search covers the arguments, and the contents of any lists, tuples, dicts and objects of user classes among them. It
lists each module once, under the first path that leads to it. It omits a module inside another listed module, because
the outer module's weights include the inner one's.
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
"""An argument path: the position of an argument, or the path to an object inside it: ``args[0]['generator']``."""

_MAX_DEPTH = 4
_MAX_ITEMS = 1000
"""A container with more items counts as data and is not searched."""
_MAX_OBJECTS = 20_000
"""Maximum number of objects to visit in one search."""
_WITHOUT_MODULES = frozenset(
    {"builtins", "functools", "logging", "nblaunch", "numpy", "pandas", "threading", "torch", "types"}
)
"""Packages whose objects are not searched."""


def modules_in(args: Sequence[Any]) -> dict[ArgPath, Any]:
    """Return the modules in ``args`` by argument path, in order. This imports nothing, not even torch."""
    torch: Any = sys.modules.get("torch")
    modules = _objects_in(args, torch.nn.Module) if torch is not None else {}
    return modules if len(modules) < 2 else _outermost(modules)


def optimizers_in(args: Sequence[Any]) -> dict[ArgPath, Any]:
    """Return the optimizers in ``args`` and their schedulers, each once, like :func:`modules_in`.

    All paths are strings. A scheduler depends on its optimizer's learning rates, so it is omitted if that optimizer is
    not in ``args``.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    once: dict[int, tuple[ArgPath, Any]] = {}
    for path, optimizer in _objects_in(
        args, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    ).items():
        once.setdefault(id(optimizer), (path_name(path), optimizer))
    return {
        path: optimizer
        for path, optimizer in once.values()
        if not is_scheduler(optimizer) or id(optimizer.optimizer) in once
    }


def is_scheduler(value: Any) -> bool:
    """Return whether an object from :func:`optimizers_in` is a scheduler rather than an optimizer."""
    torch: Any = sys.modules["torch"]
    return isinstance(value, torch.optim.lr_scheduler.LRScheduler)


def _objects_in(args: Sequence[Any], kind: type | tuple[type, ...]) -> dict[ArgPath, Any]:
    objects: dict[ArgPath, Any] = {}
    seen: set[int] = set()
    for position, arg in enumerate(args):
        if _is_a(arg, kind):
            objects[position] = arg
        else:
            objects.update(_inside(arg, f"args[{position}]", kind, _MAX_DEPTH, seen))
    return objects


def _is_a(value: Any, kind: type | tuple[type, ...]) -> bool:
    try:
        return isinstance(value, kind)
    except Exception:  # raised by a proxy's __class__, for example if its object no longer exists
        return False


def modules_at(args: Sequence[Any], paths: Sequence[ArgPath]) -> dict[ArgPath, Any]:
    """Return the modules in ``args`` that :func:`modules_in` found at ``paths``, in this or another process.

    Modules may be missing: the pickle of an object can omit them.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not paths:
        return {}
    if any(isinstance(path, str) for path in paths):
        modules = modules_in(args)
    else:
        modules = {path: args[path] for path in paths if isinstance(path, int)}
    return {path: modules[path] for path in paths if isinstance(modules.get(path), torch.nn.Module)}


def optimizers_at(args: Sequence[Any], paths: Sequence[ArgPath]) -> dict[ArgPath, Any]:
    """Return the optimizers and schedulers that :func:`optimizers_in` found at ``paths``; see :func:`modules_at`."""
    if not paths:
        return {}
    optimizers = optimizers_in(args)
    return {path: optimizers[path] for path in paths if path in optimizers}


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
        # A proxy's __class__ may raise an error.
        if issubclass(type(part), kind):
            yield name + step, part
        elif depth > 1 and id(part) not in seen:
            yield from _inside(part, name + step, kind, depth - 1, seen)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each object in a container, with the part of the path that leads to it."""
    cls = type(value)
    if issubclass(cls, (list, tuple)):
        if len(value) <= _MAX_ITEMS:
            names = getattr(cls, "_fields", None)  # the fields of a named tuple
            yield from ((f".{names[i]}" if names else f"[{i}]", part) for i, part in enumerate(value))
    elif issubclass(cls, dict):
        if len(value) <= _MAX_ITEMS:
            yield from ((_key(key, i), part) for i, (key, part) in enumerate(list(value.items())))
    elif dataclasses.is_dataclass(cls):
        names = dict.fromkeys([*(field.name for field in dataclasses.fields(cls)), *_attributes(value)])
        yield from ((f".{name}", getattr(value, name)) for name in names if hasattr(value, name))
    elif issubclass(cls, (SimpleNamespace, argparse.Namespace)):
        yield from ((f".{name}", part) for name, part in vars(value).items())
    elif cls.__module__.partition(".")[0] not in _WITHOUT_MODULES and not issubclass(cls, type):
        yield from ((f".{name}", part) for name, part in _attributes(value).items())


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an instance of a user's or a library's class, without calling a proxy's code."""
    try:
        held = object.__getattribute__(value, "__dict__")
    except Exception:  # no attributes, or a property that raises an error
        return {}
    return dict(held) if type(held) is dict and len(held) <= _MAX_ITEMS else {}


def _key(key: Any, index: int) -> str:
    """Return ``['name']``, or the key's index if the key's text may differ between processes."""
    return f"[{key!r}]" if isinstance(key, (str, int, enum.Enum)) else f"[key {index}]"


def _outermost(modules: dict[ArgPath, Any]) -> dict[ArgPath, Any]:
    """Return each module once, without modules that are parts of others."""
    parts = {id(part) for module in modules.values() for part in module.modules() if part is not module}
    kept: dict[int, ArgPath] = {}
    for path, module in modules.items():
        if id(module) not in parts:
            kept.setdefault(id(module), path)
    return {path: modules[path] for path in kept.values()}
