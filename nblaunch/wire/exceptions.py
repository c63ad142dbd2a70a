"""Exceptions on their way from a worker to the kernel, with causes, contexts, notes and attributes.

This module also shortens long strings in messages by cutting out the middle.
"""

from __future__ import annotations

import builtins
import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any

from nblaunch.wire.pickling.payload import to_bytes

MAX_CHARACTERS = 1 << 16
"""Maximum number of characters of an exception's text that are sent and shown. The exception keeps its whole text."""


def shortened(text: str, max_characters: int) -> str:
    """Shorten ``text`` to about the allowed number of characters, and say how many are omitted."""
    missing = len(text) - max_characters
    if missing <= 0:
        return text
    half = max_characters // 2
    return f"{text[:half]}... ({missing:,} characters omitted) ...{text[-half:]}"


def fewer_lines(text: str, max_lines: int) -> str:
    """Return ``text`` in at most ``max_lines`` lines, one of which says how many are missing; keep the last line."""
    lines = text.splitlines()
    missing = len(lines) - max_lines + 1
    if missing <= 1:
        return text
    num_first = max(1, (max_lines - 1) // 3)
    left_out = f"... ({missing:,} lines omitted; str() of the exception has all of them) ..."
    return "\n".join([*lines[:num_first], left_out, *lines[num_first + missing :]])


_MAX_BYTES = 64 << 20
_MAX_CHAIN = 8


def dump(error: BaseException) -> bytes | None:
    """Pickle the exception; return None if it can't be pickled and rebuilt.

    This function also tries to rebuild the exception: if a constructor's parameters differ from ``args``, the
    exception can be written but not read. Such an exception is sent in parts.
    """
    try:
        body = _to_bytes(_Chain.of(error))
        restored = pickle.loads(body).restore()
    except BaseException:  # its code may even call sys.exit(); the caller has the text
        return None
    return body if type(restored) is type(error) else None


def load(body: bytes) -> BaseException:
    """Read what :func:`dump` wrote.

    Raises:
        Exception: its class does not exist in this process.
    """
    return pickle.loads(body).restore()


def from_text(type_name: str, message: str, parts: Sequence[BaseException]) -> BaseException | None:
    """Return an exception of the named class with this text; None if this process has no such class.

    This function is for exceptions from other machines, which are never unpickled. It imports no module and runs no
    Python code of the class.

    Args:
        type_name: as in :class:`nblaunch.events.ExceptionInfo`.
        message: text that its ``str`` returns.
        parts: the exceptions inside an exception group.
    """
    cls = _class_named(type_name)
    if cls is None or not isinstance(cls.__new__, BuiltinFunctionType):
        return None
    try:
        error = cls.__new__(cls, message, parts) if parts else cls.__new__(cls, message)
        is_plain = cls.__str__ is Exception.__str__ and not parts
        return error if is_plain else with_text(error, message)
    except TypeError:  # its constructor needs other arguments
        return None


def _class_named(type_name: str) -> type[Exception] | None:
    """Return the class if its module is loaded; do not call a module's ``__getattr__``, which may import others."""
    names = type_name.split(".")
    for length in range(len(names) - 1, 0, -1):
        if ".".join(names[:length]) in sys.modules:
            homes, names = [".".join(names[:length])], names[length:]
            break
    else:
        homes = ["__main__", "builtins"]
    for home in homes:
        target: Any = sys.modules[home]
        for name in names:
            target = vars(target).get(name) if hasattr(target, "__dict__") else None
        if isinstance(target, type) and issubclass(target, Exception):
            return target
    return None


def set_attribute(error: BaseException, name: str, value: Any) -> None:
    """Set an attribute, such as ``__cause__``, even if the class forbids it, as a frozen dataclass does."""
    BaseException.__setattr__(error, name, value)


def with_text(error: BaseException, text: str) -> BaseException:
    """Return ``error`` with ``text`` as its ``str``: the same object if possible, or an instance of a derived class."""
    cls = type(error)

    def reduce(self: BaseException) -> tuple[Any, ...]:
        maker, *rest = tuple[Any, ...](cls.__reduce__(self))
        return (cls if maker is derived else maker, *rest)

    body = {"__str__": lambda self: text, "__reduce__": reduce, "__module__": cls.__module__, "__slots__": ()}
    derived = type(cls.__name__, (cls,), body)
    try:
        set_attribute(error, "__class__", derived)
        return error
    except TypeError:  # objects of Python's own classes can't change their class
        reduced: Any = error.__reduce__()  # Python's own exceptions contain more than their ``args``
        made: BaseException = derived(*reduced[1])
    set_attribute(made, "args", error.args)
    made.__dict__.update(vars(error))
    for name in ("__cause__", "__context__", "__suppress_context__"):
        set_attribute(made, name, getattr(error, name))
    return made


def parts_of(error: BaseException) -> tuple[BaseException, ...]:
    """Return the exceptions in an exception group; empty for other exceptions, and before Python 3.11."""
    group = getattr(builtins, "BaseExceptionGroup", None)
    return tuple(error.exceptions) if group is not None and isinstance(error, group) else ()


@dataclass
class _Chain:
    """An exception with its ``__cause__`` and ``__context__``, which pickle drops."""

    error: BaseException | _Parts
    cause: _Chain | None
    context: _Chain | None
    is_suppressed: bool

    @classmethod
    def of(cls, error: BaseException, depth: int = _MAX_CHAIN) -> _Chain:
        cause, context = error.__cause__, error.__context__
        return cls(
            error if _can_travel(error) else _Parts.of(error),
            cls.of(cause, depth - 1) if cause is not None and depth else None,
            cls.of(context, depth - 1) if context is not None and context is not cause and depth else None,
            error.__suppress_context__,
        )

    def restore(self) -> BaseException:
        error = self.error.restore() if isinstance(self.error, _Parts) else self.error
        if self.cause is not None:
            set_attribute(error, "__cause__", self.cause.restore())
        if self.context is not None:
            set_attribute(error, "__context__", self.context.restore())
        set_attribute(error, "__suppress_context__", self.is_suppressed)
        return error


@dataclass
class _Parts:
    """An exception split into its parts, for classes whose constructors have parameters that differ from ``args``.

    It omits attributes that can't be pickled or are too large, such as a model.
    """

    type: type[BaseException]
    args: tuple[Any, ...]
    attributes: dict[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> _Parts:
        args = tuple(arg if _can_travel(arg) else repr(arg) for arg in error.args)
        return cls(type(error), args, {name: part for name, part in vars(error).items() if _can_travel(part)})

    def restore(self) -> BaseException:
        error = self.type.__new__(self.type, *self.args)
        set_attribute(error, "args", self.args)
        error.__dict__.update(self.attributes)
        return error


def _can_travel(value: Any) -> bool:
    try:
        restored = pickle.loads(_to_bytes(value))
    except BaseException:
        return False
    return type(restored) is type(value)


def _to_bytes(value: Any) -> bytes:
    return to_bytes(value, main_by_reference=True, max_bytes=_MAX_BYTES)
