"""A job as text: the table, the progress in one line, and the dashboard that shows both in scripts and terminals.

The table is also the plain text of a notebook's display (``html.py``, ``notebook.py``), for front ends without HTML.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TextIO, final

from nblaunch import env, formatting
from nblaunch.dashboard.base import Pace, ViewingDashboard, uptime
from nblaunch.dashboard.columns import COLUMNS, full_length, furthest_behind
from nblaunch.dashboard.palette import STATE_LOOKS, outcome_look, paint, unpainted
from nblaunch.dashboard.result import Failure, Figure
from nblaunch.dashboard.table import EpochTable, Table, headline, tabulate
from nblaunch.dashboard.view import JobView, replace
from nblaunch.events import Event, InputAwaited, InputRead

if TYPE_CHECKING:
    from rich.live import Live


def progress_line(view: JobView) -> str:
    """Return the progress of the rank that is furthest behind, in one line."""
    behind = furthest_behind(view)
    table = tabulate(replace(view, ranks=(behind,)))
    row = table.rows[0]
    parts = [f"{name} {cell}" for name, cell in zip(table.columns, row.cells, strict=True) if cell]
    about = f"rank {behind.rank} " if len(view.ranks) > 1 else ""
    return f"{table.name}: {headline(view)}; {about}{', '.join([row.state_text, *parts])}"


_BAR_WIDTH = 16
_GAP = 2  # characters between two columns
_TEXT_COLUMNS = ("state", "progress", "output")  # aligned to the left
_USUAL_WIDTHS = {
    "state": 10,
    "progress": _BAR_WIDTH,
    **{name: column.usual_width for name, column in COLUMNS.items()},
}
_DISPENSABLE = ("samples/s", "peak memory", "peak device", "progress", "epoch", "steps/s", "ETA", "output")
"""Columns in the order in which they are omitted on a narrow terminal."""

_MIN_OUTPUT_WIDTH = 24
_DETAIL_WIDTH = 60  # without a terminal

Tail = Sequence[tuple[int, str]]
"""``(rank, line)`` of the last lines of output."""

Paint = Callable[[str, str], str]
"""A function that colours text: :func:`nblaunch.dashboard.palette.paint`, or one that returns it unchanged."""


def render_text(
    view: JobView,
    *,
    tail: Tail | None = None,
    paint: Paint = unpainted,
    table: Table | None = None,
    width: int | None = None,
    is_live: bool = False,
) -> str:
    """Return the table as text, without a final line ending.

    The text contains the headline, failures, figures of a job that has ended, the rows, the ranks in lockstep (see
    ``table.py``), then notices, warnings, the table of epochs or the last metrics, and the log folder.

    Args:
        view: the job.
        tail: the last lines of output, shown with the notes; None if another output shows them.
        paint: colours states, failures and warnings.
        table: table of this view, if the caller has it.
        width: columns of the terminal; a narrow terminal shows fewer columns of the table.
        is_live: the table is redrawn in place, without epochs or metrics.
    """
    table = table or tabulate(view)
    lines = [_headline(view, table, paint, width if is_live else None)]
    if table.progress and not table.stall and not is_live:  # the rows say the same
        lines += [f"    {table.progress}"]
    lines += [table.fallback] if table.fallback else []
    for failure in table.failures:
        lines += _failure_lines(failure, paint)
    lines += [f"{figure.name}: {_figure(figure)}" for figure in table.figures]
    if shows_rows(view, table):
        lines += _table_lines(table, paint, width)
        lines += [table.collapsed] if table.collapsed else []
    else:
        lines += [table.alike] if table.alike else []
    for notice in table.notices:
        lines += [paint(notice.text, "yellow"), *(f"    {line}" for line in notice.lines)]
    lines += [f"    {table.stall.advice}"] if table.stall and table.stall.advice else []
    lines += [f"{paint('warning', 'yellow')}: {text}" for text in table.warnings]
    if is_live:
        return "\n".join(lines)
    lines += _epoch_lines(table.epochs)
    lines += [table.metrics] if table.metrics else []
    if tail is not None:
        lines += [f"note: {text}" for text in table.notes]
        lines += ["last output:", *(f"[{rank}] {line}" for rank, line in tail)] if tail else []
    if view.is_over and table.runs:
        lines.append("runs: " + ", ".join(f"{tracker} {location}" for tracker, location in table.runs))
    if view.is_over and table.log_dir:
        lines.append(f"logs: {table.log_dir}")
    return "\n".join(lines)


def _headline(view: JobView, table: Table, paint: Paint, width: int | None) -> str:
    """Return the first line, cut to ``width`` columns if a terminal redraws the table."""
    still = table.stall
    if still is not None:
        text = f"{table.name}: {still.text}"
        return paint(text if width is None else _cut(text, width), "red" if still.is_certain else "yellow")
    is_failing = bool(table.failures) and not view.is_over
    headline = paint(table.headline, "red" if is_failing else outcome_look(view.outcome).style)
    return f"{table.name}: {headline} on {table.setting}" if view.is_started else headline


def shows_rows(view: JobView, table: Table) -> bool:
    """Return whether the rows add anything to the figures of a job that has ended."""
    if not table.rows or table.alike:
        return False
    is_plain = len({(row.state_text, row.detail) for row in table.rows}) == 1 and not table.columns
    return not view.is_over or not (len(view.ranks) == 1 or is_plain)


def _failure_lines(failure: Failure, paint: Paint) -> list[str]:
    if failure.is_secondary:
        return [paint(f"{failure.who} {failure.text}", "dim")]
    where = f" ({failure.where})" if failure.where else ""
    return [
        f"{paint(failure.who, 'red')}: {failure.text}{where}",
        *(f"    {line}" for line in failure.advice),
    ]


def _figure(figure: Figure) -> str:
    return f"{figure.value} ({figure.note})" if figure.note else figure.value


def _table_lines(table: Table, paint: Paint, width: int | None) -> list[str]:
    columns = _fitting_columns(table, width)
    rows = zip(*([name, *column.cells] for name, column in columns.items()), strict=True)
    styles = ["", *(STATE_LOOKS[row.state].style for row in table.rows)]
    lines = []
    for cells, style in zip(rows, styles, strict=True):
        padded = []
        for (name, column), cell in zip(columns.items(), cells, strict=True):
            space = " " * (column.width - len(cell))
            shade = style if name in ("state", "progress") else ""
            # Text is aligned to the left, numbers to the right.
            padded.append(f"{paint(cell, shade)}{space}" if name in _TEXT_COLUMNS else f"{space}{cell}")
        lines.append((" " * _GAP).join(padded).rstrip())
    return lines


class _Column(NamedTuple):
    """A column of the table: its width, and the text of each cell."""

    width: int
    cells: list[str]


def _fitting_columns(table: Table, width: int | None) -> dict[str, _Column]:
    """Return the columns that fit side by side. A missing number is better than a truncated one."""
    cells = {
        "rank": [row.label for row in table.rows],
        "state": [row.state_text for row in table.rows],
    }
    if any(row.fraction is not None for row in table.rows):
        cells["progress"] = [_track(row.fraction or 0.0) for row in table.rows]
    cells |= {name: [row.cells[index] for row in table.rows] for index, name in enumerate(table.columns)}
    widths = {name: _width_of(name, texts) for name, texts in cells.items()}
    if any(row.detail for row in table.rows):
        widths["output"] = _DETAIL_WIDTH if width is None else _MIN_OUTPUT_WIDTH
    if width is not None:
        for name in _DISPENSABLE:
            if _total(widths) <= width:
                break
            widths.pop(name, None)
    if "output" in widths:
        widths["output"] += 0 if width is None else width - _total(widths)  # takes the remaining width
        cells["output"] = [_cut(row.detail, widths["output"]) for row in table.rows]
    return {name: _Column(number, cells[name]) for name, number in widths.items()}


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _total(widths: dict[str, int]) -> int:
    return sum(number + _GAP for number in widths.values()) - _GAP


def _width_of(name: str, cells: Sequence[str]) -> int:
    """Return the width of a column: at least enough for its usual text, so that columns do not come and go."""
    if name == "step":
        return max(len(name), *map(full_length, cells))
    return max(len(name), _USUAL_WIDTHS.get(name, 0), *map(len, cells))


def _track(fraction: float) -> str:
    halves = int(fraction * 2 * _BAR_WIDTH)
    return "━" * (halves // 2) + "╸" * (halves % 2)


def _epoch_lines(table: EpochTable) -> list[str]:
    lines = formatting.columns([table.columns, *table.rows], num_left=0) if table.columns else []
    return [*lines, *[table.note] * bool(table.note)]


# --- the dashboard for scripts and terminals --------------------------------------------------------------------------

# It shows progress, and a table at the end. On a terminal, progress is a table that rich redraws in place. Elsewhere,
# and on dumb terminals (which can't move the cursor up), a line is written at intervals. Only terminals get colours.

_FIRST_LIVE_S, _LIVE_S = 0.5, 0.2  # seconds before the table is first drawn, and between redraws
_FIRST_LINE_S = 2.0  # before the first line; a short job writes only the final table

_DEFAULT_SIZE = (80, 24)


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal."""
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError):  # not a file, or closed
        return False


def moves_cursor(stream: Any) -> bool:
    """Return whether rich considers a stream a terminal that understands escape sequences."""
    return is_terminal(stream) and env.read("TERM").lower() not in ("dumb", "unknown")


def has_colour(stream: Any) -> bool:
    """Return whether to write colours to a stream: only to a terminal, unless NO_COLOR or FORCE_COLOR is set.

    Source: https://no-color.org and https://force-color.org; NO_COLOR wins, as in Python itself.
    """
    if env.read("NO_COLOR"):
        return False
    return bool(env.read("FORCE_COLOR")) or moves_cursor(stream)


def size_of(stream: Any) -> tuple[int, int]:
    """Return the columns and lines of a terminal; 80 and 24 if they are unknown."""
    try:
        columns, lines = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError, AttributeError):
        columns, lines = 0, 0
    return columns or _DEFAULT_SIZE[0], lines or _DEFAULT_SIZE[1]


def encodable(stream: TextIO, text: str) -> str:
    """Return the text with ``?`` in place of characters that the stream's encoding lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"  # encodes all but lone surrogates
    return text if text.isascii() else text.encode(encoding, "replace").decode(encoding)


def write(stream: TextIO, text: str) -> None:
    """Write text in one call, with ``?`` in place of characters that the stream's encoding lacks."""
    stream.write(encodable(stream, text))


@final
class LiveTable:
    """Progress at the bottom of a terminal, redrawn in place; the terminal must be able to move its cursor.

        train: running for 12 s on 2 processes (cpu, fork)
        rank  state       progress          epoch         step  steps/s    loss
           0  training    ━━━━━━━╸            1/4    450/1,000     10.0  0.5321
           1  waiting     ━━━━━━━╸            1/4    450/1,000     10.0  0.5330

    Args:
        stream: default: ``sys.stderr``, looked up on each use.
    """

    latest: ClassVar[LiveTable | None] = None
    """The display that was opened last; a terminal has room for only one."""

    def __init__(self, stream: TextIO | None = None) -> None:
        LiveTable.latest = self
        self._stream = stream
        self._render: Callable[[int], str] | None = None
        self._live: Live | None = None

    def draw(self, view: JobView) -> None:
        """Show the progress of a job."""
        self.draw_text(lambda width: render_text(view, paint=paint, width=width, is_live=True))

    def draw_text(self, render: Callable[[int], str]) -> None:
        """Show the text that ``render`` returns for the terminal's width, cut to the terminal's height."""
        from rich.text import Text  # importing rich takes 100 ms, and only terminals need it

        self._render = render
        live = self._live or self._start()
        live.console.size = size = size_of(self._to)
        live.update(Text.from_ansi(encodable(self._to, render(size[0]))), refresh=True)

    def clear(self) -> None:
        """Remove the table; the cursor is then at the beginning of an empty line."""
        self._render = None
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the table while the block writes whole lines to the terminal."""
        render = self._render
        self.clear()
        try:
            yield
        finally:
            if render is not None:
                self.draw_text(render)

    @property
    def _to(self) -> TextIO:
        return sys.stderr if self._stream is None else self._stream

    def _start(self) -> Live:
        from rich.console import Console
        from rich.live import Live

        # Don't use a thread, because a forked process would not have it, and don't replace streams, because workers'
        # output is written around the table.
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


@contextmanager
def live_hidden() -> Iterator[None]:
    """Hide the live table, if there is one, while the block asks the user a question."""
    live = LiveTable.latest
    with live.hidden() if live is not None else nullcontext():
        yield


@final
class TextDashboard(ViewingDashboard):
    """Progress, and a table at the end.

    On a terminal, a table is redrawn in place. Elsewhere (a file, a pipe, the log of a batch job) a line is written
    every few seconds.

    Args:
        stream: default: ``sys.stderr``, looked up on each write.
        live: the table that is redrawn on the terminal, shared with other writers; None = write lines instead.
        clock: seconds on a clock that never jumps.
    """

    def __init__(
        self,
        *,
        stream: TextIO | None = None,
        live: LiveTable | None = None,
        clock: Callable[[], float] = uptime,
    ) -> None:
        self._stream = stream
        self._live = live
        if live is not None:
            pace = Pace(first_s=_FIRST_LIVE_S, interval_s=_LIVE_S, slow_s=_LIVE_S, clock=clock)
        else:
            pace = Pace(first_s=_FIRST_LINE_S, interval_s=5.0, slow_s=25.0, slow_after_s=60.0, clock=clock)
        super().__init__(pace)
        self._last_line = ""
        self._is_user_typing = False

    def on_event(self, event: Event) -> None:
        super().on_event(event)
        if isinstance(event, InputAwaited):
            self._is_user_typing = event.rank >= 0
        elif isinstance(event, InputRead):
            self._is_user_typing = False

    def _draw(self) -> None:
        self._pace.note_published()
        if self._is_user_typing:
            return
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
            # The hang report has already been printed.
            text = render_text(
                replace(view, hang=()),
                paint=paint if has_colour(self._to) else unpainted,
                width=size_of(self._to)[0] if is_terminal(self._to) else None,
            )
            self._write(f"{text}\n")

    @property
    def _to(self) -> TextIO:
        return sys.stderr if self._stream is None else self._stream

    def _write(self, text: str) -> None:
        stream = self._to
        write(stream, text)
        stream.flush()
