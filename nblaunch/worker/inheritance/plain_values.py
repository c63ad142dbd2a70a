"""Module-level values that a copy can replace, and how a worker adopts the copies.

Numbers, strings, functions, classes and containers of them are plain. Objects that only hold plain values are also
plain: namespaces, data classes, a user's settings. A model does not count as plain, because a copy would differ from
the model that the function trains.
"""

from __future__ import annotations

import collections
import copyreg
import functools
import re
import threading
import types
from collections.abc import Sequence
from contextvars import ContextVar
from enum import Enum
from numbers import Number
from pathlib import PurePath
from types import ModuleType
from typing import Any

from nblaunch.user_code import content_of

MAX_PARTS = 20_000
"""Values with more parts are not plain, because reading them would delay the launch."""

_ATOMS = (
    *(type(None), Number, str, bytes, range, re.Pattern, PurePath, Enum, type, ModuleType),
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType),
)
_CONSTANTS = ("Tensor", "Size", "device", "dtype", "layout", "memory_format", "ndarray")
_CONTAINERS = (collections.OrderedDict, dict, list, set, collections.deque, bytearray)
_BASES = (object, *_CONTAINERS, collections.defaultdict, types.SimpleNamespace)
_IS_MADE_AT_RUN_TIME = 1 << 9
"""``Py_TPFLAGS_HEAPTYPE``: classes that are not compiled into Python or an extension."""


def is_plain(value: Any) -> bool:
    """Return whether a copy can replace a value."""
    pending, seen = [value], {id(value)}
    while pending:
        parts = _parts(pending.pop())
        if parts is None:
            return False
        for part in parts:
            if id(part) not in seen:
                seen.add(id(part))
                pending.append(part)
        if len(seen) > MAX_PARTS:
            return False
    return True


def has_own_class(value: Any) -> bool:
    """Return whether a value's ``__class__`` is its type.

    A proxy returns another object's class, or raises an error if that object is missing.
    """
    try:
        return value.__class__ is type(value)
    except Exception:  # for example, werkzeug's request outside a request
        return False


def is_changeable(value: Any) -> bool:
    """Return whether a value can change without an assignment: a container, an object or a thread's state."""
    if not has_own_class(value):
        return False
    if isinstance(value, (ContextVar, threading.local, *_CONTAINERS)):
        return True
    return not isinstance(value, (*_ATOMS, tuple, frozenset, types.FunctionType)) and (
        _attributes(value) is not None
    )


def take_over(present: Any, value: Any) -> bool:
    """Give an object in this process a copy's content, so that everything that refers to the object sees this content.

    Args:
        present: the object.
        value: the copy, whose content the object gets.

    Returns:
        Whether the object now has the content.
    """
    return _take_over(present, value, set())


def _take_over(present: Any, value: Any, done: set[int]) -> bool:
    if type(present) is not type(value) or not is_changeable(present):
        return False
    if id(present) in done:
        return True
    done.add(id(present))
    if isinstance(present, _CONTAINERS):
        _replace_content(present, value, done)
    attributes = _attributes(value)
    if attributes is not None:
        _replace_attributes(present, attributes, done)
    return True


def _replace_content(container: Any, value: Any, done: set[int]) -> None:
    # Use the built-in class's methods, because a subclass may forbid changes or make them later.
    kind: Any = next(kind for kind in _CONTAINERS if isinstance(container, kind))
    if issubclass(kind, dict):
        before = dict(container)
        kind.clear(container)
        for key, new in dict.items(value):
            old = before.get(key)
            kind.__setitem__(container, key, old if _take_over(old, new, done) else new)
    else:
        kind.clear(container)
        (kind.update if kind is set else kind.extend)(container, value)


def _replace_attributes(present: Any, attributes: dict[str, Any], done: set[int]) -> None:
    for name, new in attributes.items():
        old = getattr(present, name, None)
        if not _take_over(old, new, done):
            object.__setattr__(present, name, new)
    for name in [*getattr(present, "__dict__", ())]:
        if name not in attributes:
            object.__delattr__(present, name)


def _parts(value: Any) -> Sequence[Any] | None:
    """Return the values that a plain value consists of; None if it is not plain."""
    if not has_own_class(value):
        return None
    if isinstance(value, _ATOMS):
        return ()
    if isinstance(value, types.FunctionType):
        return [
            *map(content_of, value.__closure__ or ()),
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
        ]
    if isinstance(value, (staticmethod, classmethod)):
        return [value.__func__]
    if isinstance(value, property):
        return [value.fget, value.fset, value.fdel]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if type(value) in (tuple, frozenset, bytearray):
        return list(value)
    if isinstance(value, _CONTAINERS):
        items = [*dict.keys(value), *dict.values(value)] if isinstance(value, dict) else list(value)
        attributes = _attributes(value)
        if type(value) in _CONTAINERS or isinstance(value, (collections.Counter, collections.defaultdict)):
            return items + ([value.default_factory] if isinstance(value, collections.defaultdict) else [])
        return None if attributes is None else [*items, *attributes.values()]
    if _is_constant_of_library(value):
        return ()
    attributes = _attributes(value)
    return None if attributes is None else list(attributes.values())


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return the attributes of an object that only holds values; None for other objects.

    A class that customizes pickling decides what belongs to its objects, and a class implemented in C may
    hold memory of its own.
    """
    kind: Any = type(value)
    if not all(base in _BASES or base.__flags__ & _IS_MADE_AT_RUN_TIME for base in kind.__mro__):
        return None
    has_own_pickling = (
        kind.__reduce_ex__ is not object.__reduce_ex__ or kind.__reduce__ is not object.__reduce__
    )
    if has_own_pickling and not issubclass(kind, _BASES[1:]):
        return None
    attributes = dict(getattr(value, "__dict__", {}))
    for name in copyreg._slotnames(kind):  # type: ignore[attr-defined]
        if hasattr(value, name):
            attributes[name] = getattr(value, name)
    return attributes


def _is_constant_of_library(value: Any) -> bool:
    """Return whether a value is a torch dtype or device, or an array or tensor that no optimizer changes."""
    kind = type(value)
    if kind.__module__ not in ("torch", "numpy"):
        return False
    return kind.__name__ in _CONSTANTS and not getattr(value, "requires_grad", False)
