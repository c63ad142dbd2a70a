"""The table of ranks made of widgets: a state, a progress bar, numbers, a sparkline and the last line for each.

    rank  state      progress       epoch  step     steps/s  loss      trend   output
       0  ● training ▆▆▆▆▆▆______       1  450/1000    10.0  0.5321   ╲_______  epoch 1: 45%|████▌ ...

Five widgets a row, in one grid, so that columns are aligned whatever stands in them. The number of rows is that of the
ranks which have one (``table.py``); rows are made once and then only change what they show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import ipywidgets as widgets
from ipywidgets.widgets.widget_int import ProgressStyle  # not among the public names, in 7 and 8 alike

from nblaunch.dashboard import colours
from nblaunch.dashboard.chart import sparkline
from nblaunch.dashboard.table import Row, Table
from nblaunch.dashboard.widget_valve import Valve
from nblaunch.events import WorkerState

BAR_STEPS = 200
"""Positions of a progress bar: finer ones can't be seen."""

_TEXT = "font-size:13px;line-height:22px;font-variant-numeric:tabular-nums;white-space:nowrap"
_MONO = "font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:12px"
_MUTED = "opacity:.65"
_CUT = "white-space:pre;overflow:hidden;text-overflow:ellipsis"
_GAP = "10px"
_COLUMNS = "minmax(9em,max-content) 110px max-content max-content minmax(8em,1fr)"

# How often the parts of a row are worth a message, in seconds.
_NUMBERS_S, _DETAIL_S, _TREND_S = 0.8, 1.0, 4.0
_TREND_LENGTH = 5  # losses that make a line worth drawing


@dataclass(frozen=True, eq=False)
class _RowWidgets:
    """The widgets of one row, from left to right."""

    state: Any
    bar: Any
    cells: Any
    trend: Any
    detail: Any

    @property
    def all(self) -> tuple[Any, ...]:
        return (self.state, self.bar, self.cells, self.trend, self.detail)


class RowGrid:
    """The rows of a job.

    Args:
        valve: through which they change.
    """

    def __init__(self, valve: Valve) -> None:
        self._valve = valve
        # Layouts and styles are widgets, too: shared, they are opened once and not for every cell.
        self._shown = widgets.Layout(margin="0", min_width="0", overflow="hidden", height="22px")
        self._bar_shown = widgets.Layout(margin="4px 0", width="110px", height="14px")
        self._bar_unknown = widgets.Layout(margin="4px 0", width="110px", height="14px", visibility="hidden")
        self._styles = {
            colour: ProgressStyle(bar_color=colour) for colour in dict.fromkeys(colours.OF_STATE.values())
        }
        self._widths: dict[str, int] = {}
        self._head = [self._text(title) for title in ("", "", "", "", "")]
        self._rows: list[_RowWidgets] = []
        self.widget = widgets.GridBox(
            children=self._head,
            layout=widgets.Layout(
                grid_template_columns=_COLUMNS, grid_gap="0 18px", display="none", margin="4px 0",
                align_items="center", width="100%", overflow="auto hidden",
            ),
        )  # fmt: skip

    @property
    def unused(self) -> list[Any]:
        """Widgets that are made but not always part of the grid."""
        return [
            self._shown, self._bar_shown, self._bar_unknown, *self._styles.values(),
        ]  # fmt: skip

    def show(self, table: Table) -> None:
        """Make the rows show ``table``, which has always the same ranks; sent at the valve's next flushes."""
        self._make_rows(len(table.rows))
        # Where columns move, they move in all rows at once.
        has_moved = self._fit(table)
        self._show_head(table)
        for parts, row in zip(self._rows, table.rows, strict=False):
            self._show_row(parts, row, table.columns, has_moved=has_moved)

    def _text(self, value: str = "") -> Any:
        return widgets.HTML(value, layout=self._shown)

    def _make_rows(self, number: int) -> None:
        if number <= len(self._rows):
            return
        while len(self._rows) < number:
            bar = widgets.IntProgress(
                value=0, min=0, max=BAR_STEPS, layout=self._bar_unknown, style=self._styles[colours.CALM]
            )
            self._rows.append(_RowWidgets(self._text(), bar, self._text(), self._text(), self._text()))
        self.widget.layout.display = "grid"
        self.widget.children = [*self._head, *(part for parts in self._rows for part in parts.all)]

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

    def _show_head(self, table: Table) -> None:
        titles = (
            self._state_cell("rank", "state"),
            "progress" if any(row.fraction is not None for row in table.rows) else "",
            self._cells({name: name for name in self._widths}),
            "trend" if any(len(row.loss_history) >= _TREND_LENGTH for row in table.rows) else "",
            "output" if any(row.detail for row in table.rows) else "",
        )
        for widget, title in zip(self._head, titles, strict=True):
            self._valve.want(widget, value=f'<div style="{_TEXT};{_MUTED}">{title}</div>', is_urgent=True)

    def _show_row(self, parts: _RowWidgets, row: Row, names: Sequence[str], *, has_moved: bool) -> None:
        colour = colours.OF_STATE[row.state]
        is_calm = row.rank is None or row.state in (WorkerState.STOPPED, WorkerState.STARTING)
        text = f"{_TEXT};{_MUTED}" if is_calm else _TEXT
        state = f'<span style="color:{colour}">&#9679;</span> {escape(row.state_text)}'
        state = f'<div style="{text}">{self._state_cell(escape(row.label), state)}</div>'
        self._valve.want(parts.state, value=state, is_urgent=True)
        self._valve.want(
            parts.bar,
            every_s=_NUMBERS_S,
            group="numbers",  # ranks in step must be seen in step
            value=round(BAR_STEPS * (row.fraction or 0.0)),
            style=self._styles[colour],
            layout=self._bar_unknown if row.fraction is None else self._bar_shown,
        )
        cells = f'<div style="{text}">{self._cells(dict(zip(names, row.cells, strict=True)))}</div>'
        self._valve.want(
            parts.cells,
            every_s=_NUMBERS_S,
            is_urgent=has_moved,
            group="numbers",
            value=cells,
            layout=self._shown,
        )
        has_trend = len(row.loss_history) >= _TREND_LENGTH
        trend = _if_any(sparkline(row.loss_history) if has_trend else "", "line-height:20px")
        self._valve.want(parts.trend, every_s=_TREND_S, value=trend)
        detail = _if_any(escape(row.detail), f"{_MONO};line-height:22px;{_MUTED};{_CUT}")
        self._valve.want(parts.detail, every_s=_DETAIL_S, value=detail)

    def _cells(self, texts: Mapping[str, str]) -> str:
        """Texts side by side, each to the right of a column that is as wide in every row."""
        # "ch" is the width of a digit; letters may be a little wider.
        widths = " ".join(f"{width + 0.5}ch" for width in self._widths.values())
        spans = "".join(f"<span>{escape(texts.get(name, ''))}</span>" for name in self._widths)
        return f'<div style="display:grid;grid-template-columns:{widths};gap:{_GAP};text-align:right">{spans}</div>'

    @staticmethod
    def _state_cell(label: str, state: str) -> str:
        style = "display:inline-block;min-width:2.2em;padding-right:.9em;text-align:right"
        return f'<span style="{style}">{label}</span>{state}'


def _if_any(content: str, style: str) -> str:
    return f'<div style="{style}">{content}</div>' if content else ""


def _merged(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """The names of ``new``, and after its neighbour each of ``old`` that is missing there."""
    names = list(new)
    for index, name in enumerate(old):
        if name not in names:
            names.insert(names.index(old[index - 1]) + 1 if index else 0, name)
    return names
