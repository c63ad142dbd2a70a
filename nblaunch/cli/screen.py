"""Output of a running notebook on a terminal: printed lines, and below them the table of processes, drawn in place.

If the output is not a terminal (a file, the log of a batch system), the table is written from time to time, and once
more when its cell has ended.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from time import monotonic
from typing import TextIO

from nblaunch.dashboard.terminal import write

_FIRST_INTERVAL_S = 2.0
_LAST_INTERVAL_S = 60.0
_SLOWDOWN = 1.5
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


def without_colours(text: str) -> str:
    """Return the text without ANSI control sequences."""
    return _ANSI.sub("", text)


class Screen:
    """A display of a notebook's output.

    Args:
        stream: terminal or file.
        is_live: draw the table in place; None = if the stream is a terminal.
        clock: monotonic seconds.
    """

    def __init__(
        self, stream: TextIO, *, is_live: bool | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        self._stream = stream
        self._is_live = stream.isatty() if is_live is None else is_live
        self._clock = clock
        self._tables: dict[str, str] = {}
        self._num_drawn = 0  # number of lines of tables at the bottom of the terminal
        self._started_line = ""  # incomplete line, held back while tables are below
        self._is_mid_line = False
        self._written: dict[str, str] = {}
        self._interval_s = _FIRST_INTERVAL_S
        self._next_s = 0.0

    def heading(self, text: str) -> None:
        """Show the heading of the next cell."""
        self.end_cell()
        self._end_line()
        self._put(f"{text}\n")
        self._interval_s, self._next_s = _FIRST_INTERVAL_S, self._clock()

    def text(self, text: str) -> None:
        """Show printed text, which may end within a line."""
        if not self._is_live:
            text = without_colours(text)
        if not self._num_drawn:
            self._put(self._started_line + text)
            self._started_line = ""
            return
        lines, separator, self._started_line = (self._started_line + text).rpartition("\n")
        if separator:
            self._erase()
            self._put(f"{lines}\n")
            self._draw()

    def table(self, name: str, text: str) -> None:
        """Show or update the table called ``name``."""
        if self._tables.get(name) == text:
            return
        self._tables[name] = text
        if self._is_live:
            self._erase()
            self._draw()
        elif self._clock() >= self._next_s:
            self._write_tables()
            self._interval_s = min(self._interval_s * _SLOWDOWN, _LAST_INTERVAL_S)
            self._next_s = self._clock() + self._interval_s

    def end_cell(self) -> None:
        """Write the final tables of the cell."""
        if self._is_live:
            # All lines, including those that did not fit on the terminal.
            self._erase()
            self._put("".join(f"{text}\n" for text in self._tables.values()))
        else:
            self._write_tables()
        self._tables, self._written = {}, {}
        if self._started_line:
            self._put(f"{self._started_line}\n")
            self._started_line = ""

    def _write_tables(self) -> None:
        for name, text in self._tables.items():
            if self._written.get(name) != text:
                self._written[name] = text
                self._end_line()
                self._put(f"{text}\n")

    def _draw(self) -> None:
        self._end_line()
        size = shutil.get_terminal_size()
        lines = [line for text in self._tables.values() for line in text.splitlines()]
        # Lines that wrap or scroll could not be erased.
        lines = [line[: size.columns - 1] for line in lines][: max(1, size.lines - 2)]
        self._put("".join(f"{line}\n" for line in lines))
        self._num_drawn = len(lines)

    def _erase(self) -> None:
        if self._num_drawn:
            self._emit(f"\x1b[{self._num_drawn}F\x1b[J")  # source: ECMA-48, CPL and ED
            self._num_drawn = 0

    def _end_line(self) -> None:
        if self._is_mid_line:
            self._put("\n")

    def _put(self, text: str) -> None:
        if text:
            self._emit(text)
            self._is_mid_line = not text.endswith("\n")

    def _emit(self, text: str) -> None:
        write(self._stream, text)
        self._stream.flush()
