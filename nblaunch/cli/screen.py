"""A running notebook on a terminal: lines as they come, and below them the table of processes, drawn in place.

Where the output is no terminal (a file, a batch system's log), the table is written every few seconds instead, ever
more rarely, and once more when its cell has ended.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from time import monotonic
from typing import TextIO

from nblaunch.dashboard.text import write

_FIRST_INTERVAL_S = 2.0
_LAST_INTERVAL_S = 60.0
_SLOWER = 1.5
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")


def without_colours(text: str) -> str:
    """The text without a terminal's control sequences."""
    return _ANSI.sub("", text)


class Screen:
    """Where a notebook's output goes.

    Args:
        stream: the terminal or file.
        is_live: whether the table is drawn in place; None = where the stream is a terminal.
        clock: seconds on a clock that never jumps.
    """

    def __init__(
        self, stream: TextIO, *, is_live: bool | None = None, clock: Callable[[], float] = monotonic
    ) -> None:
        self._stream = stream
        self._is_live = stream.isatty() if is_live is None else is_live
        self._clock = clock
        self._tables: dict[str, str] = {}
        self._num_drawn = 0  # lines of tables at the bottom of the terminal
        self._started_line = ""  # without its end yet; held back while tables stand below
        self._is_mid_line = False
        self._written: dict[str, str] = {}
        self._interval_s = _FIRST_INTERVAL_S
        self._next_s = 0.0

    def heading(self, text: str) -> None:
        """A cell begins."""
        self.end_cell()
        self._end_line()
        self._put(f"{text}\n")
        self._interval_s, self._next_s = _FIRST_INTERVAL_S, self._clock()

    def text(self, text: str) -> None:
        """What the cell printed; it need not be whole lines."""
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
        """The table called ``name`` is now ``text``."""
        if self._tables.get(name) == text:
            return
        self._tables[name] = text
        if self._is_live:
            self._erase()
            self._draw()
        elif self._clock() >= self._next_s:
            self._write_tables()
            self._interval_s = min(self._interval_s * _SLOWER, _LAST_INTERVAL_S)
            self._next_s = self._clock() + self._interval_s

    def end_cell(self) -> None:
        """The cell has ended: its tables stay as they are."""
        if self._is_live:
            # In full, also what did not fit above the bottom of the terminal.
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
        # A line that wraps, or one that scrolls, could not be taken back.
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
