"""The lines that a job prints in a cell, folded if they are many.

the first lines, as they arrive
▸ show all: 7,942 more lines
the last lines
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from html import escape

from nblaunch import formatting
from nblaunch.dashboard.base import Bundle

MAX_IN_CELL = 60
"""Largest number of lines of a job that a cell prints; the others are folded."""

_FIRST_IN_CELL = 40
_MAX_FOLDED = 5_000  # lines
_FOLDED = (
    "margin:2px 0;padding:4px 8px;border-left:2px solid rgba(128,128,128,.3);background:none;color:inherit;"
    "white-space:pre-wrap;overflow:auto;max-height:40em;font-size:12px"
)


class FoldedLines:
    """The lines of a job in a cell: the first ones, then all others behind a line that unfolds them, then the last."""

    def __init__(self) -> None:
        self._num_first = 0
        self._others: deque[str] = deque(maxlen=_MAX_FOLDED)
        self._num_others = 0

    def take(self, texts: Sequence[str]) -> list[str]:
        """Add texts of whole lines; return the first lines of the job, to be printed at once."""
        lines = [line for text in texts for line in text.splitlines(keepends=True)]
        first = lines[: max(_FIRST_IN_CELL - self._num_first, 0)]
        self._num_first += len(first)
        self._others.extend(lines[len(first) :])
        self._num_others += len(lines) - len(first)
        return first

    def rest(self, log_dir: str) -> tuple[Bundle | None, list[str]]:
        """Return an output that unfolds lines (None if they are few), and the last lines, to be printed below it."""
        others = list(self._others)
        num_last = MAX_IN_CELL - _FIRST_IN_CELL - 2
        if self._num_others <= num_last:
            return None, others
        folded, last = others[:-num_last], others[-num_last:]
        summary = formatting.count(self._num_others - num_last, "more line")
        logs = f"; complete logs: {log_dir}" if log_dir else ""
        text = escape("".join(folded))
        shown = (
            f'<details style="font-family:system-ui,sans-serif;font-size:13px"><summary style="cursor:pointer">'
            f'show all: {summary}</summary><pre style="{_FOLDED}">{text}</pre></details>'
        )
        return {"text/html": shown, "text/plain": f"... {summary} not shown{logs}"}, last
