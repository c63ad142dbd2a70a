"""The dashboard for scripts and terminals: progress that is redrawn in place, and a table at the end.

    LiveTable (``live_table.py``)   a row per rank, where the package rich is installed
    LiveLine                        one line, elsewhere

rich is no dependency, since notebooks have a display of their own. Where the output is no terminal, a line is written
from time to time. Colours are for terminals (``ansi.py``).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from time import monotonic
from typing import Protocol, TextIO, final
from unicodedata import east_asian_width

from nblaunch.dashboard.ansi import has_colour, is_terminal, moves_cursor, paint, size_of, unpainted
from nblaunch.dashboard.base import Pace, ViewingDashboard
from nblaunch.dashboard.text import live_line, progress_line, render_text
from nblaunch.dashboard.view import JobView
from nblaunch.packages import is_installed

_FIRST_LIVE_S, _LIVE_S = 0.5, 0.2  # seconds before the first drawing, and between two


class LiveDisplay(Protocol):
    """Progress at the bottom of a terminal, redrawn in place."""

    @property
    def is_possible(self) -> bool:
        """Return whether the stream is a terminal."""

    def draw(self, view: JobView) -> None:
        """Show the progress of a job."""

    def clear(self) -> None:
        """Remove it; the cursor is then at the beginning of an empty line."""

    def hidden(self) -> AbstractContextManager[None]:
        """Hide it while the block writes whole lines to the terminal."""


def open_live(stream: TextIO | None = None) -> LiveDisplay:
    """Return a table where rich is installed and the terminal can move its cursor, else a line.

    Args:
        stream: default: ``sys.stderr``.
    """
    if is_installed("rich") and moves_cursor(sys.stderr if stream is None else stream):
        from nblaunch.dashboard.live_table import LiveTable

        return LiveTable(stream)
    return LiveLine(stream)


@final
class LiveLine:
    """A line of a terminal that is redrawn in place, with carriage returns and spaces alone.

    Args:
        stream: default: ``sys.stderr``, looked up at each write.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._drawn = ""

    @property
    def is_possible(self) -> bool:
        """Return whether the stream is a terminal."""
        return is_terminal(self._to)

    @property
    def width(self) -> int:
        """Return the number of columns before a line wraps."""
        return size_of(self._to)[0] - 1

    @property
    def can_draw_blocks(self) -> bool:
        """Return whether the encoding of the stream has block characters for bars."""
        return _has_blocks(self._to)

    def draw(self, view: JobView) -> None:
        """Show the progress of a job."""
        self.show(live_line(view, self.width, has_blocks=self.can_draw_blocks))

    def show(self, text: str) -> None:
        """Replace the line by ``text``, cut to the width of the terminal."""
        text = cut(text, self.width)
        if text == self._drawn:
            return
        rest = " " * max(columns_of(self._drawn) - columns_of(text), 0)
        self._write(f"\r{_painted(text) if has_colour(self._to) else text}{rest}")
        self._drawn = text

    def clear(self) -> None:
        """Remove the line; the cursor is then at the beginning of an empty line."""
        if self._drawn:
            self._write(f"\r{' ' * columns_of(self._drawn)}\r")
            self._drawn = ""

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the line while the block writes whole lines to the terminal."""
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


_WORDS = re.compile(r"(?P<cyan>[█▏▎▍▌▋▊▉]+)|(?P<yellow>\d* ?waiting)|(?P<red>\d* ?failed)|(?P<dim>starting)")


def _painted(text: str) -> str:
    """Return a line with its bar and the states that matter in colours."""
    return _WORDS.sub(lambda found: paint(found[0], found.lastgroup or ""), text)


def _has_blocks(stream: TextIO) -> bool:
    """Return whether the encoding of a stream has the characters of bars."""
    try:
        "█▏━╸".encode(getattr(stream, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def columns_of(text: str) -> int:
    """Return the width of ``text`` on a terminal, where some characters take two columns."""
    return len(text) + sum(east_asian_width(one) in "WF" for one in text if not one.isascii())


def cut(text: str, width: int) -> str:
    """Return ``text``, cut to ``width`` columns with an ellipsis."""
    if columns_of(text) <= width:
        return text
    while text and columns_of(text) > width - 3:
        text = text[:-1]
    return f"{text}..."


def write(stream: TextIO, text: str) -> None:
    """Write in one call, with ``?`` for characters that the encoding of the stream lacks."""
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = getattr(stream, "encoding", None) or "ascii"
        stream.write(text.encode(encoding, "replace").decode(encoding))


@final
class TextDashboard(ViewingDashboard):
    """A progress line, and a table at the end.

    On a terminal a table or a line is redrawn in place, as rich and tqdm do. Elsewhere (a file, a pipe, the log of a
    batch job) a new line is written every few seconds.

    Args:
        stream: default: ``sys.stderr``, looked up at each write.
        live: what is redrawn on the terminal, shared with other writers; None = redraw nothing.
        first_s: seconds before the first progress line; a short job prints its final table only.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        live: LiveDisplay | None = None,
        first_s: float = 2.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._stream = stream
        self._live = live if live is not None and live.is_possible else None
        if self._live is not None:
            pace = Pace(first_s=_FIRST_LIVE_S, interval_s=_LIVE_S, slow_s=_LIVE_S, clock=clock)
        else:
            pace = Pace(first_s=first_s, interval_s=5.0, slow_s=25.0, slow_after_s=60.0, clock=clock)
        super().__init__(pace)
        self._last_line = ""

    def _draw(self) -> None:
        self._pace.note_published()
        if self._live is not None:
            self._live.draw(self._view)
            return
        line = progress_line(self._view)
        if line != self._last_line:
            self._last_line = line
            self._write(line + "\n")

    def _draw_last(self, view: JobView) -> None:
        if self._live is not None:
            self._live.clear()
        if view.is_started:
            # A hang was reported in lines when it was seen.
            text = render_text(
                replace(view, hang=()),
                paint=paint if has_colour(self._to) else unpainted,
                width=size_of(self._to)[0] if is_terminal(self._to) else None,
                has_blocks=_has_blocks(self._to),
            )
            self._write(f"{text}\n")

    @property
    def _to(self) -> TextIO:
        return sys.stderr if self._stream is None else self._stream

    def _write(self, text: str) -> None:
        stream = self._to
        write(stream, text)
        stream.flush()
