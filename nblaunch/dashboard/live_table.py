"""The table of a job at the bottom of a terminal, drawn by rich. Imported only where rich is installed (13 or later).

train running for 12 s on 2 processes (cpu, fork)
rank  state       progress          epoch         step  steps/s    loss
   0  training    ━━━━━━━╸━━━━━━━━    1/4    450/1,000     10.0  0.5321
   1  waiting     ━━━━━━━╸━━━━━━━━    1/4    450/1,000     10.0  0.5330

A terminal that is too narrow has fewer columns.
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

from nblaunch.dashboard.ansi import has_colour, moves_cursor, size_of
from nblaunch.dashboard.palette import STATE_LOOKS, outcome_look
from nblaunch.dashboard.rows import Row
from nblaunch.dashboard.table import Table, tabulate
from nblaunch.dashboard.text import (
    BAR_WIDTH,
    GAP,
    MIN_OUTPUT_WIDTH,
    TEXT_COLUMNS,
    collapsed_lines,
    fitting,
    is_starting,
    total_width,
    width_of,
)
from nblaunch.dashboard.view import JobView


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
        live.console.size = size = size_of(self._to)
        live.update(renderable(view, size[0]), refresh=True)

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


def renderable(view: JobView, width: int) -> RenderableType:
    """Return the headline, the rows, and remarks about them, for a terminal of ``width`` columns."""
    table = tabulate(view)
    head = Text(no_wrap=True, overflow="ellipsis")
    head.append(f"{table.name} ", style="bold")
    head.append(table.headline, style=outcome_look(view.outcome).style)
    head.append(f" on {table.setting}", style="dim")
    remarks = [Text(f"{label}: {text}", style="red") for label, text in table.failures]
    for notice in table.notices:
        remarks += [Text(notice.text, style="yellow"), *(Text(f"    {line}") for line in notice.lines)]
    remarks += [Text(f"warning: {text}", style="yellow") for text in table.warnings]
    collapsed = [Text(line, no_wrap=True, overflow="ellipsis") for line in collapsed_lines(table)]
    drawn, has_output = _rows(view, table, width)
    stalled = [] if has_output else [row for row in table.rows if row.is_stalled]
    abouts = [f"rank {row.label}: " for row in stalled]
    where = [
        about + row.detail_within(width - len(about)) for about, row in zip(abouts, stalled, strict=True)
    ]
    return Group(head, drawn, *map(Text, where), *collapsed, *remarks)


def _rows(view: JobView, table: Table, width: int) -> tuple[RichTable, bool]:
    """Return the rows, and whether the column with the output of the ranks has room."""
    starting = "starting" if is_starting(view) else ""
    columns: dict[str, list[RenderableType]] = {
        "rank": [Text(row.label) for row in table.rows],
        "state": [_state(row, starting) for row in table.rows],
    }
    if any(row.fraction is not None for row in table.rows):
        columns["progress"] = [_bar(row) for row in table.rows]
    for index, name in enumerate(table.columns):
        columns[name] = [Text(row.cells[index]) for row in table.rows]
    widths = {
        name: width_of(name, [cell.plain for cell in cells if isinstance(cell, Text)])
        for name, cells in columns.items()
    }
    if any(row.detail for row in table.rows):
        widths["output"] = MIN_OUTPUT_WIDTH
    drawn = RichTable(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    shown = fitting(widths, width)
    if "output" in shown:  # takes what is left
        widths["output"] += width - total_width(widths, shown)
        columns["output"] = [
            Text(row.detail_within(widths["output"]), style="dim", overflow="ellipsis") for row in table.rows
        ]
    for name in shown:
        is_text = name in TEXT_COLUMNS
        drawn.add_column(name, justify="left" if is_text else "right", width=widths[name], no_wrap=True)
    for cells in zip(*(columns[name] for name in shown), strict=True):
        drawn.add_row(*cells)
    return drawn, "output" in shown


def _state(row: Row, instead: str) -> Text:
    return Text(instead or row.state_text, style="dim" if instead else STATE_LOOKS[row.state].style)


def _bar(row: Row) -> RenderableType:
    if row.fraction is None:
        return ""
    style = STATE_LOOKS[row.state].style
    return ProgressBar(
        total=1.0, completed=row.fraction, width=BAR_WIDTH, complete_style=style, finished_style=style
    )
