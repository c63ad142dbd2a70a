"""A job as lines of text: the renderer, and the dashboard of scripts and plain terminals.

Owns widths and alignment of the text table. Writes to one stream, never asks for colours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from time import monotonic
from typing import TextIO, final

from nblaunch.dashboard.base import Pace
from nblaunch.dashboard.progress import live_line, progress_line
from nblaunch.dashboard.table import Table, tabulate
from nblaunch.dashboard.table_rows import GRID_COLUMNS, GridCell, Row
from nblaunch.dashboard.terminal import LiveLine
from nblaunch.dashboard.view import JobView
from nblaunch.dashboard.viewing import ViewingDashboard

_DETAIL_WIDTH = 60
_FIRST_LIVE_S, _LIVE_S = 0.5, 0.2  # a redrawn line: before the first, and between two


def render_text(view: JobView, *, with_output: bool = False) -> str:
    """The table as text, without a final line end.

    One header line, one line per process (beyond 16 processes the extremes, a summary and a grid of the others), then
    how the job is doing, failures, notices and warnings, the last metrics, memory and where the logs are.

    Args:
        view: what to render.
        with_output: add the notes and the last lines of output of all ranks, where nothing else shows them.
    """
    table = tabulate(view)
    lines = [*(_table_lines(table) if table.rows else []), *_grid_lines(table.grid)]
    lines.append(f"{table.name}: {table.headline} on {table.setting}" if view.is_started else table.headline)
    lines += [table.detour] if table.detour else []
    lines += [f"{label}: {text}" for label, text in table.failures]
    for notice in table.notices:
        lines += [notice.text, *(f"    {line}" for line in notice.lines)]
    lines += [f"warning: {text}" for text in table.warnings]
    lines += [table.metrics] if table.metrics else []
    lines += [table.memory] if table.memory else []
    if with_output:
        lines += [f"note: {text}" for text in table.notes]
        lines += ["last output:"] if view.tail else []
        lines += [f"[{rank}] {line}" for rank, line in view.tail]
    if view.is_over and table.log_dir:
        lines.append(f"logs: {table.log_dir}")
    return "\n".join(lines)


def _table_lines(table: Table) -> list[str]:
    has_detail = any(row.detail for row in table.rows)
    grid = [("rank", "state", *table.columns, "output" if has_detail else "")]
    grid += [_cells(row) for row in table.rows]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    last = len(widths) - 1
    # Words to the left, numbers to the right.
    lines = []
    for cells in grid:
        padded = [
            cell.ljust(width) if index in (1, last) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def _grid_lines(cells: Sequence[GridCell]) -> list[str]:
    """``16 45%   17 44%   18 waiting ...``: so many ranks a line, all equally wide."""
    texts = [f"{cell.rank:>3} {cell.text}" for cell in cells]
    width = max(map(len, texts), default=0)
    return [
        "  ".join(text.ljust(width) for text in texts[start : start + GRID_COLUMNS]).rstrip()
        for start in range(0, len(texts), GRID_COLUMNS)
    ]


def _cells(row: Row) -> tuple[str, ...]:
    detail = row.detail if len(row.detail) <= _DETAIL_WIDTH else row.detail[: _DETAIL_WIDTH - 1] + "…"
    return (row.label, row.state_text, *row.cells, detail)


def write(stream: TextIO, text: str) -> None:
    """Write in one call, with ``?`` in place of characters that the stream's encoding lacks."""
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = getattr(stream, "encoding", None) or "ascii"
        stream.write(text.encode(encoding, "replace").decode(encoding))


@final
class TextDashboard(ViewingDashboard):
    """A line of progress, and a table at the end.

    On a terminal one line is redrawn in place, as tqdm does. Elsewhere (a file, a pipe, a batch job's log) a new line
    is written every few seconds, ever more rarely.

    Args:
        stream: where to; default ``sys.stderr`` as it is at each write, so that a script's output stays its own.
        live: the line of the terminal, shared with whatever else writes there; None = never redraw one.
        first_s: seconds before the first line of progress: a short job prints its final table only.
        interval_s: seconds between lines during the first minute; five times that later.
        clock: seconds on a clock that never jumps.
    """

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        live: LiveLine | None = None,
        first_s: float = 2.0,
        interval_s: float = 5.0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._stream = stream
        self._live = live if live is not None and live.is_possible else None
        if self._live is not None:
            pace = Pace(first_s=_FIRST_LIVE_S, interval_s=_LIVE_S, slow_s=_LIVE_S, clock=clock)
        else:
            pace = Pace(
                first_s=first_s, interval_s=interval_s, slow_s=5 * interval_s, slow_after_s=60.0, clock=clock
            )
        super().__init__(pace)
        self._last_line = ""

    def _draw(self) -> None:
        self._pace.mark()
        if self._live is not None:
            self._live.show(live_line(self._view, self._live.width, has_blocks=self._live.can_draw_blocks))
            return
        line = progress_line(self._view)
        if line != self._last_line:
            self._last_line = line
            self._write(line + "\n")

    def _draw_last(self, view: JobView) -> None:
        if self._live is not None:
            self._live.clear()
        if view.is_started:
            self._write(render_text(view) + "\n")

    def _write(self, text: str) -> None:
        stream = sys.stderr if self._stream is None else self._stream
        write(stream, text)
        stream.flush()
