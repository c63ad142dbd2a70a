"""Variables of the notebook that a function fills or assigns. A worker's changes are lost, and a note says so.

    losses = []
    def train():
        global best
        losses.append(0.5)
        best = 0.5

In one process, both would have the values after the call. Each worker changes its own copies. Only changes whose
purpose is to collect values are reported: to containers and arrays that were empty or zero, and assignments to global
variables. A function may change other variables for its own use, such as ``args.rank = rank``.
"""

from __future__ import annotations

import dis
import functools
import re
import sys
from collections import deque
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, NoneType
from typing import Any, NamedTuple

from nblaunch.user_code import captured_variables, used_by
from nblaunch.worker.inheritance.plain_values import has_own_class

_MAX_FUNCTIONS = 200
_MAX_ELEMENTS = 1 << 16
_CONTAINERS = (list, dict, set, deque)
_FOR_ITSELF = re.compile(r"_|.*(cache|memo|lock|seen)|(device|rank|model|scaler|pool|logger)$", re.IGNORECASE)
"""Names of variables that a function keeps for itself, so the kernel needs no value."""

_NO_VALUE = object()
_LOST = (
    "the function changes {names} in its worker only, and the notebook's variables keep their values: return the new "
    "values from the function"
)


class _Variable(NamedTuple):
    """A variable that may collect values.

    Args:
        name: its name, as in ``tracker.values``.
        value: the empty container or array.
    """

    name: str
    value: Any


class Changes:
    """Watches the notebook's variables from the start of a function to its end.

    Args:
        function: the function.
        args: its arguments.
        is_forked: whether this worker may share memory with the kernel.
    """

    def __init__(self, function: Any, args: tuple[Any, ...], is_forked: bool) -> None:
        functions = list(_functions(function))
        values = [
            *used_by(function),
            *(each for reached in functions for each in captured_variables(reached)),
        ]
        values += [(f"args[{position}]", value) for position, value in enumerate(args)]
        self._empty = list({id(each.value): each for each in _collectors(values, is_forked)}.values())
        names = {name for reached in functions for name in _assigned(reached.__code__)}
        self._globals = {name: _notebook().get(name, _NO_VALUE) for name in sorted(names)}

    def describe(self, returned: Any) -> str | None:
        """Return a sentence about the changes that the kernel does not get; None if there are none.

        Args:
            returned: the function's value, which the kernel gets.
        """
        kept = {id(value) for value in _parts(returned)}
        names = [each.name for each in self._empty if _is_filled(each.value) and id(each.value) not in kept]
        for name, before in self._globals.items():
            value = _notebook().get(name, _NO_VALUE)
            if value is not before and id(value) not in kept and type(value) in _PLAIN:
                names.append(name)
        return _LOST.format(names=", ".join(dict.fromkeys(names))) if names else None


_PLAIN = (int, float, complex, str, bytes, tuple, *_CONTAINERS)


def _notebook() -> dict[str, Any]:
    return vars(sys.modules["__main__"])


def _functions(function: Any) -> Iterator[FunctionType]:
    """Yield the notebook's functions that a function may call, itself included."""
    pending: list[Any] = [function]
    seen: set[int] = set()
    while pending and len(seen) < _MAX_FUNCTIONS:
        value = pending.pop()
        if not has_own_class(value):
            continue
        while isinstance(value, (MethodType, functools.partial)):
            value = value.__func__ if isinstance(value, MethodType) else value.func
        definition = value if isinstance(value, (type, FunctionType)) else type(value)
        if id(definition) in seen or definition.__module__ != "__main__":
            continue
        seen.add(id(definition))
        if isinstance(definition, FunctionType):
            yield definition
            pending.extend(each for _, each in captured_variables(definition))
        else:
            pending.extend(each for each in vars(definition).values() if isinstance(each, FunctionType))


def _collectors(values: list[tuple[str, Any]], is_forked: bool) -> Iterator[_Variable]:
    for name, value in values:
        if _FOR_ITSELF.match(name) or not has_own_class(value):
            continue
        if _is_collector(value, is_forked):
            yield _Variable(name, value)
        elif type(value).__module__ == "__main__" and not isinstance(value, type):
            for attribute, part in getattr(value, "__dict__", {}).items():
                if _is_collector(part, is_forked) and not _FOR_ITSELF.match(attribute):
                    yield _Variable(f"{name}.{attribute}", part)


def _owns_memory(array: Any) -> bool:
    """Return whether an array, or the array of which it is a view, is not a part of a file or of shared memory."""
    while type(array.base) is type(array):
        array = array.base
    return bool(array.flags.owndata)


def _is_collector(value: Any, is_forked: bool) -> bool:
    """Return whether a value is empty or zero, and belongs to this process alone."""
    if not has_own_class(value):
        return False
    try:
        return _may_collect(value, is_forked) and _is_empty(value)
    except Exception:  # for example, a sparse tensor has no memory to ask about
        return False


def _may_collect(value: Any, is_forked: bool) -> bool:
    if type(value).__module__ == "numpy":
        is_own = type(value).__name__ == "ndarray" and (not is_forked or _owns_memory(value))
        return is_own and 0 < value.size <= _MAX_ELEMENTS and value.dtype.kind in "biufc"
    if type(value).__module__ == "torch":
        is_own = type(value).__name__ == "Tensor" and value.device.type == "cpu" and not value.requires_grad
        return is_own and 0 < value.numel() <= _MAX_ELEMENTS and not value.is_shared()
    return isinstance(value, _CONTAINERS)


def _is_filled(value: Any) -> bool:
    try:
        return not _is_empty(value)
    except Exception:  # a container of the user may raise after it was changed
        return False


def _is_empty(value: Any) -> bool:
    if isinstance(value, dict):
        return all(
            isinstance(part, (*_CONTAINERS, int, float, NoneType)) and not part for part in value.values()
        )
    if isinstance(value, _CONTAINERS):
        return not value
    return not value.any()


def _parts(value: Any) -> Iterator[Any]:
    yield value
    if type(value) in (list, tuple):
        yield from value
    elif type(value) is dict:
        yield from value.values()


def _assigned(code: CodeType) -> Iterator[str]:
    """Yield the global variables that a function assigns."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_GLOBAL" and not _FOR_ITSELF.match(instruction.argval):
            yield instruction.argval
