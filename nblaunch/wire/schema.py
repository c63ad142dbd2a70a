"""Dataclasses as JSON, converted by their annotations, for data from other processes that must not be unpickled.

    Node(id="a", node_rank=1, ...)  ── dump ──> b'{"id": "a", "node_rank": 1, ...}'  ── load(Node) ──> an equal Node

Any process that can reach a store can write to it. The reader therefore names the class that it expects and accepts
nothing else: it does not look up classes by names in the text, and runs no code chosen by the sender. The supported
types are 64-bit numbers, text, booleans, None, enums, dataclasses, tuples, mappings and unions of these. Mappings
become lists of pairs, so that keys keep their types.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from nblaunch import formatting

_T = TypeVar("_T")

_MAX_INT = 1 << 63


def dump(value: Any) -> bytes:
    """Return ``value``, a dataclass, as text that :func:`load` can read.

    Raises:
        TypeError: a part of it, for example bytes, has no plain form.
    """
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def load(cls: type[_T], text: bytes) -> _T:
    """Load a ``cls`` from the output of :func:`dump`.

    Raises:
        ValueError: ``text`` does not describe a ``cls``; the message names the difference.
    """
    try:
        value: _T = _read(cls, json.loads(text), cls.__name__)
    except RecursionError:
        raise ValueError(f"{cls.__name__}: nested too deeply") from None
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value):
        return {name: _plain(getattr(value, name)) for name in _hints(value.__class__)}
    if isinstance(value, Mapping):
        return [[_plain(key), _plain(item)] for key, item in value.items()]
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no plain form")


@cache
def _hints(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _read(hint: Any, value: Any, path: str) -> Any:
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return _read_one_of(get_args(hint), value, path)
    if origin is tuple:
        return _read_tuple(get_args(hint), value, path)
    if origin is not None and issubclass(origin, Mapping):
        pairs = enumerate(_list(value, path))
        return dict(_read_tuple(get_args(hint), item, f"{path}[{i}]") for i, item in pairs)
    if dataclasses.is_dataclass(hint):
        return _read_fields(hint, value, path)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return hint(value)
    # In Python, booleans are numbers; here they are not. An integer is accepted where a float is expected.
    if type(value) is int and not -_MAX_INT <= value < _MAX_INT:
        raise ValueError(f"{path}: a number with {value.bit_length()} bits is too large")
    if type(value) is hint or (hint is float and type(value) is int):
        return hint(value) if hint is not NoneType else None
    raise ValueError(f"{path}: expected {getattr(hint, '__name__', hint)}, got {value!r:.80}")


def _read_one_of(options: Sequence[Any], value: Any, path: str) -> Any:
    *first, last = options
    for option in first:
        with suppress(ValueError):
            return _read(option, value, path)
    return _read(last, value, path)


def _read_tuple(hints: Sequence[Any], value: Any, path: str) -> tuple[Any, ...]:
    items = _list(value, path)
    if len(hints) == 2 and hints[1] is Ellipsis:
        hints = [hints[0]] * len(items)
    if len(hints) != len(items):
        raise ValueError(f"{path}: expected {formatting.count(len(hints), 'item')}, got {len(items)}")
    return tuple(
        _read(hint, item, f"{path}[{i}]") for i, (hint, item) in enumerate(zip(hints, items, strict=True))
    )


def _read_fields(cls: Any, value: Any, path: str) -> Any:
    hints = _hints(cls)
    if not isinstance(value, dict) or set(value) != set(hints):
        raise ValueError(f"{path}: expected the fields {formatting.joined(list(hints))}, got {value!r:.80}")
    return cls(**{name: _read(hints[name], item, f"{path}.{name}") for name, item in value.items()})


def _list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{path}: expected a list, got {value!r:.80}")
    return value
