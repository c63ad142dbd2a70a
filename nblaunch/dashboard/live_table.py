"""The table of a job at the bottom of a terminal, drawn by rich. Imported only where there is such a terminal.

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

from nblaunch.dashboard.palette import STATE_LOOKS, outcome_look
from nblaunch.dashboard.rows import Row
from nblaunch.dashboard.table import Table, tabulate
from nblaunch.dashboard.terminal import has_colour, size_of
from nblaunch.dashboard.text import (
    BAR_WIDTH,
    GAP,
    TEXT_COLUMNS,
    fitting_columns,
    is_starting,
)
from nblaunch.dashboard.view import JobView


@final
class LiveTable:
    """Progress at the bottom of a terminal, redrawn in place; the terminal must be able to move its cursor.

    Args:
        stream: default: ``sys.stderr``, looked up at each use.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._view: JobView | None = None
        self._live: Live | None = None

    def draw(self, view: JobView) -> None:
        """Show the progress of a job."""
        self._view = view
        live = self._live or self._start()
        live.console.size = size = size_of(self._to)
        live.update(renderable(view, size[0]), refresh=True)

    def clear(self) -> None:
        """Remove it; the cursor is then at the beginning of an empty line."""
        self._view = None
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide it while the block writes whole lines to the terminal."""
        view = self._view
        self.clear()
        try:
            yield
        finally:
            if view is not None:
                self.draw(view)

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
    collapsed = [Text(table.collapsed, no_wrap=True, overflow="ellipsis")] if table.collapsed else []
    drawn, has_output = _rows(view, table, width)
    stalled = [] if has_output else [row for row in table.rows if row.is_stalled]
    abouts = [f"rank {row.label}: " for row in stalled]
    where = [
        about + row.detail_within(width - len(about)) for about, row in zip(abouts, stalled, strict=True)
    ]
    return Group(head, drawn, *map(Text, where), *collapsed, *remarks)


def _rows(view: JobView, table: Table, width: int) -> tuple[RichTable, bool]:
    """Return the rows, and whether the column with the output of the ranks has room."""
    is_early = is_starting(view)
    columns = fitting_columns(table, width, state="starting" if is_early else "")
    drawn = RichTable(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    for name, column in columns.items():
        is_text = name in TEXT_COLUMNS
        drawn.add_column(name, justify="left" if is_text else "right", width=column.width, no_wrap=True)
    for number, row in enumerate(table.rows):
        styles = {"state": "dim" if is_early else STATE_LOOKS[row.state].style, "output": "dim"}
        cells: dict[str, RenderableType] = {
            name: Text(column.cells[number], style=styles.get(name, "")) for name, column in columns.items()
        }
        if "progress" in cells:
            cells["progress"] = _bar(row)
        drawn.add_row(*cells.values())
    return drawn, "output" in columns


def _bar(row: Row) -> RenderableType:
    if row.fraction is None:
        return ""
    style = STATE_LOOKS[row.state].style
    return ProgressBar(
        total=1.0, completed=row.fraction, width=BAR_WIDTH, complete_style=style, finished_style=style
    )
