"""Values of a rank's variables in the traceback of its exception, for ``%debug``, pdb and verbose tracebacks."""

from __future__ import annotations

import ast
import math
from typing import Any

_MAX_CHARACTERS = 400
_FLOATS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class RankVariable:
    """A description in place of a variable that only the rank has, such as a tensor."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text

    def __reduce__(self) -> tuple[Any, ...]:
        return RankVariable, (self._text,)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} of {self._text}: the traceback has only a description of this variable. To use the variable "
            "itself, launch with post_mortem=True and call nblaunch.debug() after the error"
        )


def value_of(text: str) -> Any:
    """Return the value of ``text`` if it is a Python literal; otherwise a :class:`RankVariable`."""
    if text in _FLOATS:
        return _FLOATS[text]
    try:
        return ast.literal_eval(text) if len(text) <= _MAX_CHARACTERS else RankVariable(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return RankVariable(text)
