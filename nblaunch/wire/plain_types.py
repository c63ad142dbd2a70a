"""Values of the user's classes as Python's own types, in the pickles of events.

A class of the user's script or notebook may not exist where the event arrives (a launcher that runs scripts, a fresh
interpreter, a class inside a function). So an event's pickle names classes of nblaunch and of ``builtins``
alone, and any process can read it.
"""

from __future__ import annotations

import enum
import io
import pickle
from collections.abc import Mapping, Set
from types import BuiltinFunctionType
from typing import Any

_OURS = ("nblaunch.", "builtins")
_MAX_TEXT = 10_000
"""Characters of an object that is nothing but its text."""


def dump(event: Any, stream: io.BytesIO) -> None:
    """Write ``event`` pickled, all that is not ours or Python's own as :func:`plain` has it.

    Raises:
        Exception: it can't be: it holds itself, most likely.
    """
    _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(event)


def plain(value: Any) -> Any:
    """Return ``value`` in one of Python's own types, whatever its code does.

    Numbers and texts of derived classes become what they are derived from, enum members their values, tensors and
    arrays without dimensions their numbers, mappings, sequences and sets of derived classes dicts and lists; all else
    becomes its ``repr``.

    Raises:
        RecursionError: it holds itself.
    """
    try:
        return _plain(value)
    except RecursionError:
        raise
    except Exception as error:  # it is the user's code that is asked
        return f"<{type(value).__name__}, whose text can't be had: {type(error).__name__}>"


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    # By the base classes' own methods, which no derived class has changed.
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bytes, bytearray)):
        return bytes(memoryview(value))
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        number = value.item()
        return number if type(number) in (bool, int, float, str) else str(number)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (list, tuple, Set)):
        return list(value)
    return f"{value!r:.{_MAX_TEXT}}"


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, BuiltinFunctionType)):
            is_ours = str(obj.__module__).startswith(_OURS)
        else:
            is_ours = type(obj).__module__.startswith(_OURS) and not isinstance(obj, BaseException)
        if is_ours:
            return NotImplemented
        made = plain(obj)
        return type(made), (made,)
