"""The table of a job at the bottom of a terminal, drawn by rich. Imported only where rich is installed (13 or later).

train running for 12 s on 2 processes (cpu, fork)
rank  state     progress              epoch  step       steps/s  loss
   0  training  ━━━━━━━╸━━━━━━━━━━━━  1/4    450/1,000     10.0  0.5321
   1  waiting   ━━━━━━━╸━━━━━━━━━━━━  1/4    450/1,000     10.0  0.5330
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO, final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table as RichTable
from rich.text import Text

from nblaunch.dashboard.ansi import OUTCOME_STYLES, STATE_STYLES, has_colour, moves_cursor, size_of
from nblaunch.dashboard.rows import Row
from nblaunch.dashboard.table import Table, tabulate
from nblaunch.dashboard.text import folded_lines, is_starting
from nblaunch.dashboard.view import JobView

_BAR_WIDTH = 20


@final
class LiveTable:
    """A table of a terminal that is redrawn in place.

    Args:
        stream: default: ``sys.stderr``, looked up when it is drawn after it was hidden.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._live: Live | None = None
        self._drawn: JobView | None = None

    @property
    def is_possible(self) -> bool:
        """Return whether the stream is a terminal that can move its cursor."""
        return moves_cursor(self._to)

    def draw(self, view: JobView) -> None:
        """Show the progress of a job."""
        self._drawn = view
        live = self._live or self._start()
        live.console.size = size_of(self._to)
        live.update(renderable(view), refresh=True)

    def clear(self) -> None:
        """Remove the table; the cursor is then at the beginning of an empty line."""
        live, self._live, self._drawn = self._live, None, None
        if live is not None:
            live.stop()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the table while the block writes whole lines to the terminal."""
        drawn = self._drawn
        self.clear()
        try:
            yield
        finally:
            if drawn is not None:
                self.draw(drawn)

    @property
    def _to(self) -> TextIO:
        return sys.stderr if self._stream is None else self._stream

    def _start(self) -> Live:
        # Neither a thread, which a fork would lose, nor replaced streams: output of workers is written around it.
        self._live = Live(
            console=Console(
                file=self._to,
                force_terminal=True,
                color_system="standard" if has_colour(self._to) else None,
                highlight=False,
                markup=False,
                emoji=False,
            ),
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._live.start()
        return self._live


def renderable(view: JobView) -> RenderableType:
    """Return the headline, the rows, and remarks about them."""
    table = tabulate(view)
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append(f"{table.name} ", style="bold")
    head.append(table.headline, style=OUTCOME_STYLES.get(view.outcome, "yellow"))
    head.append(f" on {table.setting}", style="dim")
    remarks = [Text(f"{label}: {text}", style="red") for label, text in table.failures]
    for notice in table.notices:
        remarks += [Text(notice.text, style="yellow"), *(Text(f"    {line}") for line in notice.lines)]
    remarks += [Text(f"warning: {text}", style="yellow") for text in table.warnings]
    folded = [Text(line, no_wrap=True, overflow="ellipsis") for line in folded_lines(table)]
    return Group(head, _rows(view, table), *folded, *remarks)


def _rows(view: JobView, table: Table) -> RichTable:
    drawn = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    drawn.add_column("rank", justify="right", no_wrap=True)
    drawn.add_column("state", no_wrap=True)
    has_bar = any(row.fraction is not None for row in table.rows)
    if has_bar:
        drawn.add_column("progress", width=_BAR_WIDTH, no_wrap=True)
    for name in table.columns:
        drawn.add_column(name, justify="right", no_wrap=True)
    has_detail = any(row.detail for row in table.rows)
    if has_detail:
        drawn.add_column("output", ratio=1)  # the only one that rich may make narrower
    starting = "starting" if is_starting(view) else ""
    for row in table.rows:
        cells: list[RenderableType] = [Text(row.label), _state(row, starting)]
        cells += [_bar(row)] if has_bar else []
        cells += map(Text, row.cells)
        cells += [Text(row.detail, style="dim", no_wrap=True, overflow="ellipsis")] if has_detail else []
        drawn.add_row(*cells)
    return drawn


def _state(row: Row, instead: str) -> Text:
    return Text(instead or row.state_text, style="dim" if instead else STATE_STYLES[row.state])


def _bar(row: Row) -> RenderableType:
    if row.fraction is None:
        return ""
    style = STATE_STYLES[row.state]
    return ProgressBar(
        total=1.0, completed=row.fraction, width=_BAR_WIDTH, complete_style=style, finished_style=style
    )
