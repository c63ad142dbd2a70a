"""What a terminal can do, and colours by escape sequences that all of them have (source: ECMA-48, SGR)."""

from __future__ import annotations

import os
from typing import Any

from nblaunch import env

_DEFAULT_SIZE = (80, 24)
_CODES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36}


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # not a file, or closed
        return False


def moves_cursor(stream: Any) -> bool:
    """Return whether a stream is a terminal that understands escape sequences."""
    return is_terminal(stream) and env.read("TERM") != "dumb"


def has_colour(stream: Any) -> bool:
    """Return whether to write colours to a stream: if it is a terminal, unless NO_COLOR or FORCE_COLOR decides.

    Source: https://no-color.org and https://force-color.org; NO_COLOR wins, as in Python itself.
    """
    if env.read("NO_COLOR"):
        return False
    return bool(env.read("FORCE_COLOR")) or moves_cursor(stream)


def size_of(stream: Any) -> tuple[int, int]:
    """Return the columns and lines of a terminal; 80 and 24 where they are unknown."""
    try:
        columns, lines = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError, AttributeError):
        columns, lines = 0, 0
    return columns or _DEFAULT_SIZE[0], lines or _DEFAULT_SIZE[1]


def paint(text: str, style: str) -> str:
    """Return ``text`` in the colour ``style``; as it is without one."""
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if style and text else text


def unpainted(text: str, style: str) -> str:
    """Return ``text`` as it is."""
    return text
