r"""The last line of a terminal, redrawn in place, while other output scrolls by above it.

Redrawn with carriage returns and spaces alone, which every terminal understands. Owns no words.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, final
from unicodedata import east_asian_width

_DEFAULT_WIDTH = 80


@final
class LiveLine:
    """One line.

    Args:
        stream: where; default ``sys.stderr`` as it is at each write.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._drawn = ""

    @property
    def is_possible(self) -> bool:
        """Whether the stream is a terminal."""
        try:
            return bool(self._to.isatty())
        except (AttributeError, ValueError):  # not a file at all, or closed
            return False

    @property
    def width(self) -> int:
        """Columns that a line may take without being wrapped."""
        try:
            columns = os.get_terminal_size(self._to.fileno()).columns
        except (OSError, ValueError, AttributeError):
            columns = 0
        return (columns or _DEFAULT_WIDTH) - 1

    @property
    def can_draw_blocks(self) -> bool:
        """Whether the stream's encoding has the characters that bars are drawn with."""
        try:
            "█▏".encode(getattr(self._to, "encoding", None) or "ascii")
        except (UnicodeEncodeError, LookupError):
            return False
        return True

    def show(self, text: str) -> None:
        """Show ``text``, cut to the width of the terminal, in place of what was shown."""
        text = cut(text, self.width)
        if text == self._drawn:
            return
        rest = " " * max(columns_of(self._drawn) - columns_of(text), 0)
        self._write(f"\r{text}{rest}")
        self._drawn = text

    def clear(self) -> None:
        """Remove it; the cursor is then at the beginning of an empty line."""
        if self._drawn:
            self._write(f"\r{' ' * columns_of(self._drawn)}\r")
            self._drawn = ""

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """While it lasts, whole lines may be written to the terminal; they end up above the line."""
        drawn = self._drawn
        self.clear()
        try:
            yield
        finally:
            if drawn:
                self.show(drawn)

    @property
    def _to(self) -> TextIO:
        return sys.stderr if self._stream is None else self._stream

    def _write(self, text: str) -> None:
        encoding = getattr(self._to, "encoding", None) or "ascii"
        self._to.write(text.encode(encoding, "replace").decode(encoding))
        self._to.flush()


def columns_of(text: str) -> int:
    """Columns that ``text`` takes on a terminal: some characters take two."""
    return len(text) + sum(east_asian_width(one) in "WF" for one in text if not one.isascii())


def cut(text: str, width: int) -> str:
    """``text``, or as much of it as fits, with an ellipsis."""
    if columns_of(text) <= width:
        return text
    while text and columns_of(text) > width - 3:
        text = text[:-1]
    return f"{text}..."
