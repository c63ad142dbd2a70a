"""The table of ranks made of widgets: a state, a progress bar, numbers, a sparkline and the last line for each.

    rank  state      progress       epoch  step     steps/s  loss      trend   output
       0  ● training ▆▆▆▆▆▆______       1  450/1000    10.0  0.5321   ╲_______  epoch 1: 45%|████▌ ...

A widget for each column, and one for each bar: what changes together travels in one message, whatever the number of
ranks, and the budget is left to the bars. Every line is equally high, so that columns are aligned whatever stands in
them. The number of rows is that of the ranks which have one (``table.py``); it never changes once it is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets
from ipywidgets.widgets.widget_int import ProgressStyle  # not among the public names, in 7 and 8 alike

from nblaunch.dashboard import colours
from nblaunch.dashboard.chart import sparkline
from nblaunch.dashboard.table import Table
from nblaunch.dashboard.table_rows import Row
from nblaunch.dashboard.widget_valve import Valve
from nblaunch.events import WorkerState

BAR_STEPS = 200
"""Positions of a progress bar: finer ones can't be seen."""

NUMBERS = "numbers"
"""What changes together: bars and numbers of all ranks, and what else is told of them."""

_LINE_PX = 22
_TEXT = f"font-size:13px;line-height:{_LINE_PX}px;font-variant-numeric:tabular-nums;white-space:nowrap"
_MONO = "font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:12px"
_MUTED = "opacity:.65"
_LINE = f"height:{_LINE_PX}px;white-space:pre;overflow:hidden;text-overflow:ellipsis"
_GAP_PX = 14
_COLUMNS = "minmax(9em,max-content) 110px max-content max-content minmax(8em,1fr)"

# How often the parts are worth a message, in seconds; where the budget is short, bars and numbers get most of it.
_NUMBERS_S, _DETAILS_S, _TREND_S = 0.3, 0.8, 4.0
_TREND_LENGTH = 5  # losses that make a line worth drawing

# Between two messages a bar moves on in the front end. Where style sheets are dropped, it moves at each message.
_MOVE_S = 0.35
_BAR_CLASS = "nblaunch-bar"
_SMOOTH = (
    f"<style>.{_BAR_CLASS} .progress-bar{{transition:width {_MOVE_S:g}s linear}}"
    f"@media(prefers-reduced-motion:reduce){{.{_BAR_CLASS} .progress-bar{{transition:none}}}}</style>"
)


class RowGrid:
    """The rows of a job.

    Args:
        valve: through which they change.
    """

    def __init__(self, valve: Valve) -> None:
        self._valve = valve
        # Layouts and styles are widgets, too: shared, they are opened once and not for every cell.
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
            colour: ProgressStyle(bar_color=colour) for colour in dict.fromkeys(colours.OF_STATE.values())
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
        """Widgets that are made but not always part of the grid."""
        return [self._shown, self._bar_shown, self._bar_unknown, *self._styles.values()]

    def show(self, table: Table) -> None:
        """Make the rows show ``table``, which has always the same ranks; sent at the valve's next flushes."""
        self._make_bars(len(table.rows))
        states = (_state_line(escape(row.label), _state(row), is_muted=_is_calm(row)) for row in table.rows)
        head = _state_line("rank", "state", is_muted=True)
        self._valve.want(self._state, is_urgent=True, value=_column([head, *states]))
        self._show_bars(table.rows)
        # Where columns come or grow, they do at once.
        has_moved = self._fit(table)
        self._valve.want(
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
                    style=self._styles[colours.CALM], _dom_classes=(_BAR_CLASS,),
                )
            )  # fmt: skip
        self.widget.layout.display = "grid"
        self._bar_column.children = [self._bar_head, *self._bars]

    def _show_bars(self, rows: Sequence[Row]) -> None:
        title = "progress" if any(row.fraction is not None for row in rows) else ""
        self._valve.want(self._bar_head, is_urgent=True, value=_column([_line(title, _MUTED) + _SMOOTH]))
        for bar, row in zip(self._bars, rows, strict=False):
            self._valve.want(
                bar,
                every_s=_NUMBERS_S,
                group=NUMBERS,  # ranks in step must be seen in step, and bars where the numbers say
                value=round(BAR_STEPS * (row.fraction or 0.0)),
                style=self._styles[colours.OF_STATE[row.state]],
                layout=self._bar_unknown if row.fraction is None else self._bar_shown,
            )

    def _fit(self, table: Table) -> bool:
        """Make room for what stands in the table; returns whether that moved anything.

        Columns come and grow, but never go and never shrink: a table that breathes can't be read.
        """
        before = self._widths
        widths = {name: before.get(name, 0) for name in _merged(list(before), table.columns)}
        for index, name in enumerate(table.columns):
            texts = (row.cells[index] for row in table.rows)
            widths[name] = max(widths[name], len(name), *map(len, texts))
        self._widths = widths
        return widths != before

    def _numbers_of(self, table: Table) -> str:
        """All numbers as one grid, each to the right of its column."""
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
        if not self._valve.is_due(self._trend, _TREND_S):
            return
        drawn = [sparkline(row.loss_history) if _has_trend(row) else "" for row in rows]
        lines = [_line("trend", _MUTED), *map(_line, drawn)] if any(drawn) else []
        self._valve.want(self._trend, every_s=_TREND_S, value=_column(lines))

    def _show_details(self, rows: Sequence[Row]) -> None:
        has_any = any(row.detail for row in rows)
        style = f"{_MONO};{_MUTED}"
        lines = [_line("output", _MUTED), *(_line(escape(row.detail), style) for row in rows)]
        self._valve.want(self._details, every_s=_DETAILS_S, value=_column(lines) if has_any else "")


def _is_calm(row: Row) -> bool:
    return row.rank is None or row.state in (WorkerState.STOPPED, WorkerState.STARTING)


def _has_trend(row: Row) -> bool:
    return len(row.loss_history) >= _TREND_LENGTH


def _state(row: Row) -> str:
    return f'<span style="color:{colours.OF_STATE[row.state]}">&#9679;</span> {escape(row.state_text)}'


def _state_line(label: str, state: str, *, is_muted: bool) -> str:
    style = "display:inline-block;min-width:2.2em;padding-right:.9em;text-align:right"
    return _line(f'<span style="{style}">{label}</span>{state}', _MUTED if is_muted else "")


def _line(content: str, style: str = "") -> str:
    return f'<div style="{_LINE}{";" if style else ""}{style}">{content}</div>'


def _column(lines: Iterable[str]) -> str:
    content = "".join(lines)
    return f'<div style="{_TEXT}">{content}</div>' if content else ""


def _merged(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """The names of ``new``, and after its neighbour each of ``old`` that is missing there."""
    names = list(new)
    for index, name in enumerate(old):
        if name not in names:
            names.insert(names.index(old[index - 1]) + 1 if index else 0, name)
    return names
