"""Widgets of the ranks: the table of rows, and the pane with printed lines.

    rank  state      progress       epoch  step     steps/s  loss      trend   output
       0  ● training ▆▆▆▆▆▆______       1  450/1000    10.0  0.5321   ╲_______  epoch 1: 45%|████▌ ...

There is a widget for each column and one for each bar, so that a column of all ranks is one message and most of the
budget is left to the bars. All lines have the same height, which aligns the columns.

The pane has a tab for all ranks by time and one for each rank. The front end switches tabs by itself, also while a cell
runs and the kernel receives no clicks, so all tabs are kept up to date. If there are too many ranks for tabs, a list
selects the rank; it is linked in the front end too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets
from ipywidgets.widgets.widget_int import ProgressStyle  # not among the public names, in 7 and 8 alike

from nblaunch.dashboard.html import CALM, STATE_COLOURS, sparkline
from nblaunch.dashboard.lines import LastLines
from nblaunch.dashboard.table import Row, Table
from nblaunch.dashboard.widget_throttle import Throttle
from nblaunch.events import WorkerState

MAX_TABS = 16
"""Largest number of ranks with tabs; with more ranks there is a list."""

_LINE_LENGTH = 200
_SEEN_BYTES, _UNSEEN_BYTES = 3_500, 2_500  # of one tab, which is sent as a whole for each new line
_LOG_LINE_PX, _NUM_LINES = 17, 9  # the pane is a whole number of lines high, so that none is cut
_HEIGHT = f"{_LOG_LINE_PX * _NUM_LINES}px"
# Seconds between updates of the selected tab, and of the others times the number of ranks.
_SEEN_S, _UNSEEN_S = 0.9, 1.0
_PRE = (
    "margin:0;padding:0 2px;background:none;border:0;color:inherit;white-space:pre-wrap;overflow-wrap:anywhere;"
    f"font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:12px;line-height:{_LOG_LINE_PX}px"
)


class LogPane:
    """Widgets with the last lines of all ranks and of each rank.

    Args:
        last_lines: the lines.
        num_ranks: number of ranks.
        throttle: sends changes to the front end.
    """

    def __init__(self, last_lines: LastLines, num_ranks: int, throttle: Throttle) -> None:
        self._last_lines = last_lines
        self._throttle = throttle
        # A reversed column keeps the scroll bar at the newest line.
        layout = widgets.Layout(
            height=_HEIGHT, overflow="auto", display="flex", flex_flow="column-reverse", margin="0",
            justify_content="flex-start",
        )  # fmt: skip
        self._num_ranks = num_ranks
        self.links: list[Any] = []
        self.widget: Any
        self._pages: Any = None
        self._width = len(str(num_ranks - 1))
        self._panes = [widgets.HTML(_NOTHING, layout=layout) for _ in range(num_ranks + 1)]
        if num_ranks == 1:
            self._panes = self._panes[:1]
            self.widget = self._panes[0]
        elif num_ranks <= MAX_TABS:
            self.widget = self._pages = self._tabs()
        else:
            self.widget = self._list()

    def show(self) -> None:
        """Update the tabs; sent at the throttle's next flushes."""
        lines = [
            f'<span style="opacity:.6">[{rank:{self._width}}]</span> {escape(_cut(line))}'
            if self._num_ranks > 1
            else escape(_cut(line))
            for rank, line in self._last_lines.of_all()
        ]
        self._throttle.update(self._panes[0], every_s=_SEEN_S, value=_pane(lines, _SEEN_BYTES))
        # The kernel learns of a selected tab only when no cell runs, so this is a guess; all tabs are kept up to date.
        seen = getattr(self._pages, "selected_index", None)
        for rank, pane in enumerate(self._panes[1:]):
            is_seen = seen == rank + 1
            every_s = _SEEN_S if is_seen else _UNSEEN_S * self._num_ranks
            if self._throttle.is_due(pane, every_s):
                own = [escape(_cut(line)) for line in self._last_lines.of_rank(rank)]
                num_bytes = _SEEN_BYTES if is_seen else _UNSEEN_BYTES
                self._throttle.update(pane, every_s=every_s, value=_pane(own, num_bytes))

    def _titles(self) -> list[str]:
        return ["All ranks", *(f"rank {rank}" for rank in range(self._num_ranks))]

    def _tabs(self) -> Any:
        tab = widgets.Tab(children=self._panes, layout=widgets.Layout(margin="4px 0 0 0", width="100%"))
        for index, title in enumerate(self._titles()):
            tab.set_title(index, title)
        tab.selected_index = 0
        return tab

    def _list(self) -> Any:
        stack = getattr(widgets, "Stack", None)  # new in ipywidgets 8
        if stack is None:
            hint = widgets.HTML('<span style="opacity:.65">one rank alone: job.logs(rank)</span>')
            self._panes = self._panes[:1]
            return widgets.VBox([hint, *self._panes])
        chooser = widgets.Dropdown(options=self._titles(), index=0, layout=widgets.Layout(width="14em"))
        self._pages = pages = stack(children=self._panes, selected_index=0)
        self.links = [widgets.jslink((chooser, "index"), (pages, "selected_index"))]
        return widgets.VBox([chooser, pages])


_NOTHING = f'<pre style="{_PRE};opacity:.65">nothing printed yet</pre>'


def _pane(lines: list[str], num_bytes: int) -> str:
    """Return the last of ``lines`` that fit into ``num_bytes`` as HTML."""
    if not lines:
        return _NOTHING
    size, first = 0, len(lines)
    while first > 0 and (size := size + len(lines[first - 1]) + 1) <= num_bytes:
        first -= 1
    return f'<pre style="{_PRE}">' + "\n".join(lines[min(first, len(lines) - 1) :]) + "</pre>"


def _cut(line: str) -> str:
    return line if len(line) <= _LINE_LENGTH else line[: _LINE_LENGTH - 1] + "…"


BAR_STEPS = 200
"""Number of positions of a progress bar."""

NUMBERS = "numbers"
"""Group of widgets that are sent together: bars and numbers of all ranks."""

_LINE_PX = 22
_TEXT = f"font-size:13px;line-height:{_LINE_PX}px;font-variant-numeric:tabular-nums;white-space:nowrap"
_MONO = "font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:12px"
_MUTED = "opacity:.65"
_LINE = f"height:{_LINE_PX}px;white-space:pre;overflow:hidden;text-overflow:ellipsis"
_GAP_PX = 14
_COLUMNS = "minmax(9em,max-content) 110px max-content max-content minmax(8em,1fr)"

# Seconds between updates of the parts; bars and numbers get most of the budget.
_NUMBERS_S, _DETAILS_S, _TREND_S = 0.3, 0.8, 4.0
_TREND_LENGTH = 5  # smallest number of losses with a curve

# The front end animates bars between two messages, unless it removes style sheets.
_MOVE_S = 0.35
_BAR_CLASS = "nblaunch-bar"
_SMOOTH = (
    f"<style>.{_BAR_CLASS} .progress-bar{{transition:width {_MOVE_S:g}s linear}}"
    f"@media(prefers-reduced-motion:reduce){{.{_BAR_CLASS} .progress-bar{{transition:none}}}}</style>"
)


class RowGrid:
    """The rows of a job.

    Args:
        throttle: sends changes to the front end.
    """

    def __init__(self, throttle: Throttle) -> None:
        self._throttle = throttle
        # Layouts and styles are widgets too, so they are shared by all cells.
        self._shown = widgets.Layout(margin="0", min_width="0", overflow="hidden")
        bar = {
            "width": "110px",
            "height": "14px",
            "margin": f"{(_LINE_PX - 14) // 2}px 0",
            "flex": "0 0 auto",
        }
        self._bar_shown = widgets.Layout(**bar)
        self._bar_unknown = widgets.Layout(**bar, visibility="hidden")
        self._styles = {
            colour: ProgressStyle(bar_color=colour) for colour in dict.fromkeys(STATE_COLOURS.values())
        }
        self._widths: dict[str, int] = {}
        self._state, self._bar_head, self._numbers, self._trend, self._details = (
            widgets.HTML("", layout=self._shown) for _ in range(5)
        )
        self._bars: list[Any] = []
        self._bar_column = widgets.VBox([self._bar_head], layout=self._shown)
        columns = [self._state, self._bar_column, self._numbers, self._trend, self._details]
        self.widget = widgets.GridBox(
            children=columns,
            layout=widgets.Layout(
                grid_template_columns=_COLUMNS, grid_gap="0 18px", display="none", margin="4px 0",
                align_items="flex-start", width="100%", overflow="auto hidden",
            ),
        )  # fmt: skip

    @property
    def unused(self) -> list[Any]:
        """Return widgets that are not always part of the grid."""
        return [self._shown, self._bar_shown, self._bar_unknown, *self._styles.values()]

    def show(self, table: Table) -> None:
        """Update the rows to ``table``, whose ranks never change; sent at the throttle's next flushes."""
        self._make_bars(len(table.rows))
        states = (_state_line(escape(row.label), _state(row), is_muted=_is_calm(row)) for row in table.rows)
        head = _state_line("rank", "state", is_muted=True)
        self._throttle.update(self._state, is_urgent=True, value=_column([head, *states]))
        self._show_bars(table.rows)
        # New or wider columns are sent at once.
        has_moved = self._fit(table)
        self._throttle.update(
            self._numbers,
            every_s=_NUMBERS_S,
            group=NUMBERS,
            is_urgent=has_moved,
            value=self._numbers_of(table),
        )
        self._show_trend(table.rows)
        self._show_details(table.rows)

    def _make_bars(self, number: int) -> None:
        if number <= len(self._bars):
            return
        while len(self._bars) < number:
            self._bars.append(
                widgets.IntProgress(
                    value=0, min=0, max=BAR_STEPS, layout=self._bar_unknown,
                    style=self._styles[CALM], _dom_classes=(_BAR_CLASS,),
                )
            )  # fmt: skip
        self.widget.layout.display = "grid"
        self._bar_column.children = [self._bar_head, *self._bars]

    def _show_bars(self, rows: Sequence[Row]) -> None:
        title = "progress" if any(row.fraction is not None for row in rows) else ""
        self._throttle.update(self._bar_head, is_urgent=True, value=_column([_line(title, _MUTED) + _SMOOTH]))
        for bar, row in zip(self._bars, rows, strict=False):
            self._throttle.update(
                bar,
                every_s=_NUMBERS_S,
                group=NUMBERS,  # bars of all ranks and numbers must show the same moment
                value=round(BAR_STEPS * (row.fraction or 0.0)),
                style=self._styles[STATE_COLOURS[row.state]],
                layout=self._bar_unknown if row.fraction is None else self._bar_shown,
            )

    def _fit(self, table: Table) -> bool:
        """Widen columns to the texts of the table; return whether any has changed.

        Columns never shrink or disappear, because a table that moves is hard to read.
        """
        before = self._widths
        widths = {name: before.get(name, 0) for name in _merged(list(before), table.columns)}
        for index, name in enumerate(table.columns):
            texts = (row.cells[index] for row in table.rows)
            widths[name] = max(widths[name], len(name), *map(len, texts))
        self._widths = widths
        return widths != before

    def _numbers_of(self, table: Table) -> str:
        """Return all numbers as one HTML grid, aligned to the right."""
        # "ch" is the width of a digit; letters may be a little wider.
        widths = " ".join(f"{width + 0.5}ch" for width in self._widths.values())
        cells = [f'<span style="{_MUTED}">{name}</span>' for name in self._widths]
        for row in table.rows:
            texts = dict(zip(table.columns, row.cells, strict=True))
            style = f' style="{_MUTED}"' if _is_calm(row) else ""
            cells += [f"<span{style}>{escape(texts.get(name, ''))}</span>" for name in self._widths]
        style = f"display:grid;grid-template-columns:{widths};grid-auto-rows:{_LINE_PX}px;gap:0 {_GAP_PX}px"
        return f'<div style="{style};text-align:right;{_TEXT}">{"".join(cells)}</div>'

    def _show_trend(self, rows: Sequence[Row]) -> None:
        if not self._throttle.is_due(self._trend, _TREND_S):
            return
        drawn = [sparkline(row.loss_history) if _has_trend(row) else "" for row in rows]
        lines = [_line("trend", _MUTED), *map(_line, drawn)] if any(drawn) else []
        self._throttle.update(self._trend, every_s=_TREND_S, value=_column(lines))

    def _show_details(self, rows: Sequence[Row]) -> None:
        has_any = any(row.detail for row in rows)
        style = f"{_MONO};{_MUTED}"
        lines = [_line("output", _MUTED), *(_line(escape(row.detail), style) for row in rows)]
        self._throttle.update(self._details, every_s=_DETAILS_S, value=_column(lines) if has_any else "")


def _is_calm(row: Row) -> bool:
    return row.rank is None or row.state in (WorkerState.STOPPED, WorkerState.STARTING)


def _has_trend(row: Row) -> bool:
    return len(row.loss_history) >= _TREND_LENGTH


def _state(row: Row) -> str:
    return f'<span style="color:{STATE_COLOURS[row.state]}">&#9679;</span> {escape(row.state_text)}'


def _state_line(label: str, state: str, *, is_muted: bool) -> str:
    style = "display:inline-block;min-width:2.2em;padding-right:.9em;text-align:right"
    return _line(f'<span style="{style}">{label}</span>{state}', _MUTED if is_muted else "")


def _line(content: str, style: str = "") -> str:
    return f'<div style="{_LINE}{";" if style else ""}{style}">{content}</div>'


def _column(lines: Iterable[str]) -> str:
    content = "".join(lines)
    return f'<div style="{_TEXT}">{content}</div>' if content else ""


def _merged(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """Return the names of ``new``, with each missing name of ``old`` after its predecessor."""
    names = list(new)
    for index, name in enumerate(old):
        if name not in names:
            names.insert(names.index(old[index - 1]) + 1 if index else 0, name)
    return names
