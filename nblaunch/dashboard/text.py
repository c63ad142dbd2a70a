"""Text of a job: the table, the progress line, and the dashboard for scripts and terminals.

In a terminal the progress line is redrawn in place with carriage returns and spaces, which every terminal supports;
elsewhere a new line is written from time to time. There are no colours.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import monotonic
from typing import TextIO, final
from unicodedata import east_asian_width

from nblaunch import formatting
from nblaunch.dashboard.base import Pace, ViewingDashboard
from nblaunch.dashboard.epochs import EpochTable
from nblaunch.dashboard.stall import as_of_now
from nblaunch.dashboard.table import GRID_COLUMNS, GridCell, Row, Table, epoch_of, headline, tabulate
from nblaunch.dashboard.view import JobView, RankView
from nblaunch.events import WorkerState
from nblaunch.formatting import percent, rate, whole_duration

_DEFAULT_WIDTH = 80


@final
class LiveLine:
    """A line of a terminal that is redrawn in place.

    Args:
        stream: default: ``sys.stderr``, looked up at each write.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._drawn = ""

    @property
    def is_possible(self) -> bool:
        """Return whether the stream is a terminal."""
        try:
            return bool(self._to.isatty())
        except (AttributeError, ValueError):  # not a file, or closed
            return False

    @property
    def width(self) -> int:
        """Return the number of columns before a line wraps."""
        try:
            columns = os.get_terminal_size(self._to.fileno()).columns
        except (OSError, ValueError, AttributeError):
            columns = 0
        return (columns or _DEFAULT_WIDTH) - 1

    @property
    def can_draw_blocks(self) -> bool:
        """Return whether the encoding of the stream has block characters for bars."""
        try:
            "█▏".encode(getattr(self._to, "encoding", None) or "ascii")
        except (UnicodeEncodeError, LookupError):
            return False
        return True

    def show(self, text: str) -> None:
        """Replace the line by ``text``, cut to the width of the terminal."""
        text = cut(text, self.width)
        if text == self._drawn:
            return
        rest = " " * max(columns_of(self._drawn) - columns_of(text), 0)
        self._write(f"\r{text}{rest}")
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


_MIN_BAR_WIDTH, _MAX_BAR_WIDTH = 5, 30


def live_line(view: JobView, width: int, *, has_blocks: bool = True) -> str:
    """Return the progress of the rank that is furthest behind as a bar of tqdm, with the states of all ranks.

        train:  45%|█████████▏          | 450/1,000 [0:45<0:55, 10.0 steps/s, loss 0.0321, 3 training, 1 waiting]

    Args:
        view: the job.
        width: columns of the terminal.
        has_blocks: draw the bar with block characters; else with ``#``.
    """
    view = as_of_now(view)
    behind = _furthest_behind(view)
    name = view.function_name or "job"
    parts = [_times(view)]
    parts += [f"{rate(behind.steps_per_s)} steps/s"] if behind.steps_per_s else []
    parts += [f"loss {formatting.loss(behind.loss)}"] if behind.loss is not None else []
    summary = f"[{', '.join([*parts, _states(view)])}]"
    if behind.fraction is None:
        # Without a total there is no bar to draw; show the worker's own progress bar, or its step.
        done = behind.status_line or (f"step {behind.step:,}" if behind.step else "")
        return f"{name}: {summary} {done}".rstrip()
    epoch = f" epoch {epoch_of(behind)}" if behind.epoch else ""
    before = f"{name}{epoch}: {percent(behind.fraction):>4}"
    after = f"{behind.step:,}/{behind.total:,} {summary}"
    room = min(width - len(before) - len(after) - 3, _MAX_BAR_WIDTH)
    bar = f"|{_bar(behind.fraction, room, has_blocks=has_blocks)}|" if room >= _MIN_BAR_WIDTH else ""
    return f"{before}{bar} {after}"


def _times(view: JobView) -> str:
    left_s = view.left_s
    return whole_duration(int(view.elapsed_s)) + ("" if left_s is None else f"<{whole_duration(left_s)}")


def _states(view: JobView) -> str:
    """Return ``4 training``, ``3 training, 1 waiting``; for a single process its state."""
    if len(view.ranks) == 1:
        return view.ranks[0].state.name.lower()
    states: dict[WorkerState, int] = {}
    for rank in view.ranks:
        states[rank.state] = states.get(rank.state, 0) + 1
    return ", ".join(f"{number} {state.name.lower()}" for state, number in sorted(states.items()))


def _bar(fraction: float, width: int, *, has_blocks: bool) -> str:
    if not has_blocks:
        return ("#" * int(fraction * width)).ljust(width)
    eighths = int(fraction * width * 8)
    part = "▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else ""
    return ("█" * (eighths // 8) + part).ljust(width)


def _furthest_behind(view: JobView) -> RankView:
    live = [rank for rank in view.ranks if not rank.state.is_final] or list(view.ranks)
    return min(live, key=lambda rank: (rank.epoch, rank.step, rank.rank))


def progress_line(view: JobView) -> str:
    """Return the progress of the rank that is furthest behind, in one line."""
    behind = _furthest_behind(view)
    table = tabulate(replace(view, num_processes=1, ranks=(behind,)))
    row = table.rows[0]
    parts = [f"{name} {cell}" for name, cell in zip(table.columns, row.cells, strict=True) if cell]
    about = f"rank {behind.rank} " if len(view.ranks) > 1 else ""
    return f"{view.function_name or 'job'}: {headline(view)}; {about}{', '.join([row.state_text, *parts])}"


_DETAIL_WIDTH = 60
_FIRST_LIVE_S, _LIVE_S = 0.5, 0.2  # seconds before the first redrawn line, and between two


def render_text(view: JobView, *, with_output: bool = False) -> str:
    """Return the table as text, without a final line end.

    One header line, one line per process (if there are more than 16, the extremes, a summary and a grid of the others),
    then the headline, failures, notices, warnings, the table of epochs or the last metrics, memory and the folder of
    logs.

    Args:
        view: the job.
        with_output: add the notes and the last lines of output of all ranks, if nothing else shows them.
    """
    table = tabulate(view)
    lines = [*(_table_lines(table) if table.rows else []), *_grid_lines(table.grid)]
    lines.append(f"{table.name}: {table.headline} on {table.setting}" if view.is_started else table.headline)
    lines += [table.fallback] if table.fallback else []
    lines += [f"{label}: {text}" for label, text in table.failures]
    for notice in table.notices:
        lines += [notice.text, *(f"    {line}" for line in notice.lines)]
    lines += [f"warning: {text}" for text in table.warnings]
    lines += _epoch_lines(table.epochs)
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
    # Text is aligned to the left, numbers to the right.
    lines = []
    for cells in grid:
        padded = [
            cell.ljust(width) if index in (1, last) else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def _epoch_lines(table: EpochTable) -> list[str]:
    grid = [table.columns, *table.rows] if table.columns else []
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)) for cells in grid
    ]
    return [*lines, *[table.note] * bool(table.note)]


def _grid_lines(cells: Sequence[GridCell]) -> list[str]:
    """Return the grid as lines of cells of equal width: ``16 45%   17 44%   18 waiting ...``."""
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
    """Write in one call, with ``?`` for characters that the encoding of the stream lacks."""
    try:
        stream.write(text)
    except UnicodeEncodeError:
        encoding = getattr(stream, "encoding", None) or "ascii"
        stream.write(text.encode(encoding, "replace").decode(encoding))


@final
class TextDashboard(ViewingDashboard):
    """A progress line, and a table at the end.

    On a terminal one line is redrawn in place, as tqdm does. Elsewhere (a file, a pipe, the log of a batch job) a new
    line is written every few seconds.

    Args:
        stream: default: ``sys.stderr``, looked up at each write.
        live: the line of the terminal, shared with other writers; None = never redraw a line.
        first_s: seconds before the first progress line; a short job prints its final table only.
        interval_s: seconds between lines during the first minute; five times that later.
        clock: monotonic seconds.
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
        self._pace.note_published()
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
            # A hang was reported in lines when it was seen.
            self._write(render_text(replace(view, hang=())) + "\n")

    def _write(self, text: str) -> None:
        stream = sys.stderr if self._stream is None else self._stream
        write(stream, text)
        stream.flush()
