"""Names the part of a value that can't be pickled, as the user's code names it."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from types import FunctionType, MethodType
from typing import Any, NamedTuple

from nblaunch.user_code import captured_variables, has_user_class, is_user_function
from nblaunch.wire.pickling.payload import pickling_error
from nblaunch.wire.pickling.reductions import PicklingError

_FUNCTION_TYPES = (FunctionType, MethodType, functools.partial)
_NAMESPACES = ("argparse", "collections", "types")
"""Standard library modules whose classes hold attributes and items that users choose."""

_MAX_DEPTH = 4
_MAX_PARTS = 5


class UnpicklablePart(NamedTuple):
    """A part that can't be pickled.

    Args:
        name: the expression with which the user's code would refer to the part.
        error: why it can't be pickled.
        is_of_user: whether the part, or an object that contains it, belongs to one of the user's classes or functions.
    """

    name: str
    error: Exception
    is_of_user: bool

    def __str__(self) -> str:
        return f"{self.name} ({type(self.error).__name__}: {self.error})"


@dataclass(frozen=True)
class Unpicklable:
    """Replaces a part of a result that could not be sent. ``description`` is its ``repr``, and ``why`` is the error."""

    description: str
    why: str


def unpicklable_parts(value: Any, name: str) -> list[UnpicklablePart]:
    """Return the smallest parts of ``value`` that can't be pickled, such as ``result['loader'].lock``.

    Objects of a library are named as a whole, unless they contain a user's object that can't be pickled.
    """
    return list(islice(_search(value, name, _MAX_DEPTH), _MAX_PARTS))


def unpicklable_variables(function: Callable[..., Any], args: tuple[Any, ...]) -> list[UnpicklablePart]:
    """Return the variables in a call that can't be pickled: arguments, closure variables and globals."""
    parts: list[UnpicklablePart] = []
    for name, value in _variables(function, args):
        parts += unpicklable_parts(value, name)
    return parts[:_MAX_PARTS] or unpicklable_parts(function, getattr(function, "__name__", "function"))


def without_unpicklable(value: Any) -> Any:
    """Return ``value`` with an :class:`Unpicklable` in place of each part that can't be pickled; copy containers."""
    return _pruned(value, _MAX_DEPTH)


def _search(value: Any, name: str, depth: int) -> Iterator[UnpicklablePart]:
    error = pickling_error(value)
    if error is None:
        return
    is_of_library, is_of_user = _is_of_library(value), _is_of_user(value)
    is_explained = False
    if depth > 0 and not isinstance(error, PicklingError):
        for part_name, part in _parts(value, name):
            for inner in _search(part, part_name, depth - 1):
                if inner.is_of_user or not is_of_library:
                    is_explained = True
                    yield inner._replace(is_of_user=inner.is_of_user or is_of_user)
    if not is_explained:
        yield UnpicklablePart(name, error if is_of_user else _explained(value, error), is_of_user)


_KINDS = (
    (r"_thread\.", "locks or threads"),
    (r"_io\.|.*File$", "open files"),
    (r"socket|SSL", "open connections"),
)
"""Pattern for the type in Python's message, and what users call such objects."""


def _explained(value: Any, error: Exception) -> Exception:
    """Return ``error``, or an error that names the class of ``value`` if ``error`` is about a part of the value."""
    name, text = type(value).__name__, str(error)
    if "no default __reduce__" in text:  # Cython's
        return PicklingError(f"{name} can't leave the process that created it")
    match = re.search(r"cannot pickle '([^']+)' object", text)
    if match is None or match[1].rpartition(".")[2] == name:
        return error
    kind = next((kind for pattern, kind in _KINDS if re.match(pattern, match[1])), "")
    if kind:
        return PicklingError(f"{name} has {kind} of the process that created it")
    return PicklingError(f"{name} contains an object of type {match[1]}, which can't leave this process")


def _parts(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"{name}[{i}]", part) for i, part in enumerate(value))
    elif isinstance(value, _FUNCTION_TYPES):
        yield from _variables(value, ())
    elif _has_attributes_of_users(value):
        yield from ((f"{name}.{attribute}", part) for attribute, part in vars(value).items())


def _has_attributes_of_users(value: Any) -> bool:
    """Return whether a value's attributes are meaningful to users; the locks inside a ``queue.Queue`` are not."""
    if not hasattr(value, "__dict__") or inspect.ismodule(value) or inspect.isclass(value):
        return False
    package = _package_of(value)
    return package not in sys.stdlib_module_names or package in _NAMESPACES


def _is_of_library(value: Any) -> bool:
    """Return whether a value is an object with private attributes that mean nothing to users."""
    has_attributes = not isinstance(value, _FUNCTION_TYPES) and _has_attributes_of_users(value)
    return has_attributes and _package_of(value) not in _NAMESPACES and not _is_of_user(value)


def _is_of_user(value: Any) -> bool:
    """Return whether a value is a user's function or an instance of a user's class."""
    return is_user_function(value) or has_user_class(value)


def _package_of(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _variables(function: Any, args: tuple[Any, ...]) -> Iterator[tuple[str, Any]]:
    """Yield everything that is sent with a call, with its name in the user's code."""
    while isinstance(function, functools.partial):
        yield from function.keywords.items()
        function, args = function.func, (*function.args, *args)
    if inspect.ismethod(function):
        function, args = function.__func__, (function.__self__, *args)
    names = _parameters(function)
    for i, arg in enumerate(args):
        yield (names[i] if i < len(names) else f"args[{i}]"), arg
    plain = function if inspect.isfunction(function) else inspect.unwrap(function)
    if inspect.isfunction(plain):
        yield from _defaults(plain)
        yield from captured_variables(plain)
    elif callable(plain) and not inspect.isclass(plain):
        yield from (("self." + name, part) for name, part in getattr(plain, "__dict__", {}).items())


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _defaults(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code, values = function.__code__, function.__defaults__ or ()
    yield from zip(code.co_varnames[code.co_argcount - len(values) : code.co_argcount], values, strict=True)
    yield from (function.__kwdefaults__ or {}).items()


def _pruned(value: Any, depth: int) -> Any:
    error = pickling_error(value)
    if error is None:
        return value
    if depth > 0 and type(value) is dict:
        return {key: _pruned(part, depth - 1) for key, part in value.items()}
    if depth > 0 and type(value) in (list, tuple):
        return type(value)(_pruned(part, depth - 1) for part in value)
    return Unpicklable(description=_short_repr(value), why=f"{type(error).__name__}: {error}")


def _short_repr(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__qualname__} whose repr raises {type(error).__name__}>"
    return text if len(text) <= 200 else text[:200] + "..."
