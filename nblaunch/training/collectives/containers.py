"""Read the contents of containers in batches and outputs, and copy containers with new contents.

Sequences, mappings, dataclasses and attrs classes are containers. A container keeps its class, its keys and its
attributes (``default_factory``, ``maxlen``, attributes of a subclass), whatever its constructor's arguments are,
because a copy of the container gets the new contents. A container that can't be copied is created with its
constructor, and the result is checked.
"""

from __future__ import annotations

import array
import copy
import dataclasses
from collections import UserList, UserString, deque
from collections.abc import Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from nblaunch import formatting


class Leaf:
    """Base class for objects that are leaves even though they are dataclasses or sequences."""

    __slots__ = ()


# Sequences of characters and numbers, which can't contain tensors.
_LEAVES = (
    torch.Tensor, str, UserString, bytes, bytearray, memoryview, range, array.array, torch.Size, type, Leaf,
)  # fmt: skip


def children(data: Any) -> Sequence[Any] | None:
    """Return the direct contents of a container, in order; None if ``data`` is a leaf."""
    kind = type(data)
    if kind is list or kind is tuple:
        return data
    if kind is dict:
        return list(data.values())
    if isinstance(data, _LEAVES):
        return None
    if isinstance(data, Mapping):
        return list(data.values())
    if isinstance(data, Sequence):
        return list(data)
    names = _field_names(data)
    return None if names is None else [getattr(data, name) for name in names]


def rebuilt(data: Any, values: list[Any]) -> Any:
    """Return a container like ``data`` with ``values`` in place of its children; ``data`` stays unchanged.

    Raises:
        TypeError: the container can't be copied with new contents.
    """
    kind = type(data)
    if kind is list:
        return values
    if kind is tuple:
        return tuple(values)
    if isinstance(data, Mapping):
        # Some mappings iterate over rows instead of keys, such as ``tensordict.TensorDict``.
        keys = data.keys()
        contents = dict(zip(keys, values, strict=True))
        return contents if kind is dict else _rebuilt_mapping(data, contents)
    if isinstance(data, Sequence):
        return rebuilt_sequence(data, values)
    return _rebuilt_fields(data, values)


def rebuilt_sequence(data: Any, values: list[Any]) -> Any:
    """Return a sequence of the same kind as ``data`` that contains ``values``; its length may differ."""
    if isinstance(data, tuple):
        return _rebuilt_tuple(data, values)
    if isinstance(data, (list, deque, UserList)):
        made: Any = copy.copy(data)
        made.clear()
        made.extend(values)
        return made
    if _are_identical(data, values):
        return data
    if isinstance(data, MutableSequence):
        return _filled(data, dict(enumerate(values)))
    return _constructed(data, values, lambda made: _are_identical(made, values))


def check_independent(operation: str, data: Any) -> None:
    """Raise TypeError for a container whose tensors depend on each other and can't be joined or cut one by one."""
    for part in children(data) or ():
        check_independent(operation, part)
    if isinstance(data, PackedSequence):
        raise TypeError(
            f"{operation} can't join or cut a PackedSequence, because its rows are time steps, not samples. Pass "
            "the result of torch.nn.utils.rnn.pad_packed_sequence"
        )


def _field_names(data: Any) -> list[str] | None:
    """Return the names of the fields of a dataclass or an attrs class; None if ``data`` is of another kind."""
    if dataclasses.is_dataclass(data):
        return [field.name for field in dataclasses.fields(data) if hasattr(data, field.name)]
    attributes = getattr(type(data), "__attrs_attrs__", None)
    return None if attributes is None else [attribute.name for attribute in attributes]


def _rebuilt_fields(data: Any, values: list[Any]) -> Any:
    names = _field_names(data) or []
    if all(getattr(data, name) is value for name, value in zip(names, values, strict=True)):
        return data
    made = copy.copy(data)  # its constructor may take other arguments, or none
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)  # also works for frozen classes
    return made


def _rebuilt_tuple(data: tuple[Any, ...], values: list[Any]) -> Any:
    kind: Any = type(data)
    try:
        made = tuple.__new__(kind, values)  # the class's own __new__ may take other arguments, or change them
    except TypeError:
        made = kind(values)  # Python rejects the above for classes of torch.return_types
    if hasattr(data, "__dict__"):
        vars(made).update(vars(data))
    return made


def _rebuilt_mapping(data: Mapping[Any, Any], contents: dict[Any, Any]) -> Any:
    if isinstance(data, MutableMapping):  # this includes dict
        return _filled(data, contents)
    if _holds(data, contents):
        return data
    return _constructed(data, contents, lambda made: _holds(made, contents))


def _filled(data: Any, contents: dict[Any, Any]) -> Any:
    """Return a copy of a mutable container with ``contents`` assigned to its keys or positions."""
    before = {key: data[key] for key in contents}
    made = _copied(data)
    try:
        for key, value in contents.items():
            made[key] = value
    except Exception as error:
        raise _not_rebuilt(data, f"{type(error).__name__}: {error}") from error
    if not all(data[key] is value for key, value in before.items()):
        for key, value in before.items():
            data[key] = value
        raise _not_rebuilt(data, "copy.copy returns a copy that shares its contents; define __copy__")
    length = len(made.keys() if isinstance(made, Mapping) else made)
    if type(made) is not type(data) or length != len(contents):
        raise _not_rebuilt(data, f"copy.copy returns {formatting.kind(made)} of length {length}")
    return made


def _copied(data: Any) -> Any:
    """Return a copy that shares no contents; if the container wraps another one, copy that one as well."""
    made = copy.copy(data)
    if not isinstance(data, (dict, list)) and not hasattr(type(data), "__copy__"):
        for name, value in vars(made).items() if hasattr(made, "__dict__") else ():
            if isinstance(value, (dict, list)):
                vars(made)[name] = copy.copy(value)
    return made


def _constructed(data: Any, contents: Any, is_right: Any) -> Any:
    """Call an immutable container's class with ``contents``, and return the result after checking its contents."""
    try:
        made = type(data)(contents)
    except Exception as error:
        raise _not_rebuilt(data, f"{type(error).__name__}: {error}") from error
    if not is_right(made):
        raise _not_rebuilt(data, "its constructor changes these contents")
    return made


def _not_rebuilt(data: Any, reason: str) -> TypeError:
    return TypeError(
        f"can't create {formatting.kind(data)} with other tensors in it ({reason}). Pass a dict, list or tuple "
        "instead"
    )


def _are_identical(data: Any, values: list[Any]) -> bool:
    return len(data) == len(values) and all(ours is value for ours, value in zip(data, values, strict=True))


def _holds(data: Any, contents: dict[Any, Any]) -> bool:
    return len(data) == len(contents) and all(
        key in data and data[key] is value for key, value in contents.items()
    )
