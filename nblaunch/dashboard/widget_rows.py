"""Rows of the panel: one for each rank, or one line for those in lockstep, and the charts side by side.

    rank  state       progress      epoch       step  steps/s ...
     all  ● training  ▆▆▆▆______      2/6  450/1,000     24.1
    ▸ ranks 0-7 training, 24.1 steps/s each                                  a click shows each of them
    charts

The front end opens the line by itself, also while a cell runs and the kernel receives no clicks.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets as widgets

from nblaunch.dashboard.charts import charts
from nblaunch.dashboard.html import Markup, all_ranks_html, rows_html
from nblaunch.dashboard.table import Table
from nblaunch.dashboard.view import JobView
from nblaunch.dashboard.widget_throttle import MESSAGE_BYTES, Throttle


def in_style(content: str) -> str:
    """Return HTML in the style of the panel."""
    return f'<div style="font-size:13px;line-height:1.45;font-variant-numeric:tabular-nums">{content}</div>'


# --- rows ------------------------------------------------------------------------------------------------------------

ROWS_S = 0.3
"""Seconds between updates of the rows; those behind the collapsed line follow more slowly."""

_EXPANDED_S, _TILES_S = 1.0, 1.5
# Other names than those of the styles in ``html.py``.
_JOB, _COLLAPSED, _TOGGLE, _EXPANDED = "nbl-job", "nbl-collapsed", "nbl-toggle", "nbl-expanded"
COLLAPSED_SHEET = (
    "<style>"
    f".{_COLLAPSED}{{position:relative}}"
    f".{_TOGGLE}{{position:absolute!important;inset:0;z-index:1;margin:0!important;overflow:visible}}"
    f".{_TOGGLE} summary{{position:absolute;inset:0;cursor:pointer;line-height:24px;font-size:13px}}"
    "@supports selector(:has(a)){"
    f".{_JOB}:not(:has(.{_TOGGLE} details[open])) .{_EXPANDED}{{display:none!important}}}}</style>"
)
"""Style sheet of the line of the ranks in lockstep."""


class RankRows:
    """The rows of a job: the table, and the line of the ranks in lockstep, which opens on a click.

    The table is one widget and one message, as are the rows or tiles behind the line; how many messages there are does
    not depend on the number of ranks. Each message replaces what its widget shows, so what a click has opened is kept
    in a widget of its own that never changes, and a style sheet shows or hides the rest. Without it the line is open.
    """

    def __init__(self, throttle: Throttle) -> None:
        self._throttle = throttle
        # Layouts are widgets too, so they are shared.
        self._shown = widgets.Layout(margin="0", min_width="0", overflow="auto hidden")
        self._hidden = widgets.Layout(display="none")
        self._line_shown = widgets.Layout(margin="0", height="24px", width="100%")
        self._rows = widgets.HTML("", layout=self._shown)
        self._collapsed = widgets.HTML("", layout=self._shown)
        self._toggle = widgets.HTML("", layout=self._shown, _dom_classes=(_TOGGLE,))
        self._expanded = widgets.HTML("", layout=self._shown, _dom_classes=(_EXPANDED,))
        self._line = widgets.HBox(
            [self._toggle, self._collapsed], layout=self._hidden, _dom_classes=(_COLLAPSED,)
        )
        self.widget = widgets.VBox(
            [self._rows, self._line, self._expanded],
            layout=widgets.Layout(margin="4px 0", width="100%"),
            _dom_classes=(_JOB,),
        )
        self._states: list[tuple[str, str]] = []

    @property
    def unused(self) -> list[Any]:
        """Return widgets that are not always part of the rows."""
        return [self._shown, self._hidden, self._line_shown]

    def show(self, table: Table) -> None:
        """Update the rows; sent at the throttle's next flushes."""
        states = [(row.label, row.state_text) for row in table.rows]
        has_news = states != self._states  # a new state, and a rank that differs, are sent at once
        self._states = states
        if has_news or self._throttle.is_due(self._rows, ROWS_S):
            rows = in_style(rows_html(table, table.rows, Markup(is_inline=False)))
            self._throttle.update(self._rows, every_s=ROWS_S, is_urgent=has_news, value=rows)
        self._show_collapsed(table, is_urgent=has_news)

    def _show_collapsed(self, table: Table, *, is_urgent: bool) -> None:
        if not table.collapsed:
            return
        is_open = "" if table.expanded else " open"
        toggle = f'<details{is_open}><summary aria-label="show each rank"></summary></details>'
        self._throttle.update(self._toggle, is_urgent=True, value=toggle)
        self._throttle.update(self._line, is_urgent=True, layout=self._line_shown)
        text = in_style(f'<div style="padding-left:1.4em;line-height:24px">{escape(table.collapsed)}</div>')
        self._throttle.update(self._collapsed, every_s=ROWS_S, is_urgent=is_urgent, value=text)
        every_s = _EXPANDED_S if table.expanded else _TILES_S
        if self._throttle.is_due(self._expanded, every_s):
            ranks = in_style(all_ranks_html(table, Markup(is_inline=False)))
            self._throttle.update(self._expanded, every_s=every_s, value=ranks)


# --- charts --------------------------------------------------------------------------------------------------------

# Of all charts: one is about as fresh as the rows, and several that change are updated less often.
_CHART_BYTES_S = 7_000.0
_CHART_S_PER_RANK = 0.003  # seconds between charts for each rank: drawing those of 512 ranks takes 60 ms
_CHARTS_PX = 164  # height of a chart with its texts


class ChartRow:
    """The charts side by side. Each is a widget of its own, so that only those with new points are sent.

    The row has its height before the first chart, and charts that have no room beside the others are scrolled to: how
    many there will be is not known.
    """

    def __init__(self, throttle: Throttle, clock: Callable[[], float]) -> None:
        self._throttle = throttle
        self._clock = clock
        self._next_s = 0.0
        self._drawn: list[str] = []
        self._layout = widgets.Layout(margin="0", flex="0 0 auto")
        row = widgets.Layout(
            margin="0",
            flex_flow="row nowrap",
            width="100%",
            min_height=f"{_CHARTS_PX}px",
            overflow="auto hidden",
        )
        self.widget = widgets.HBox([], layout=row)

    @property
    def unused(self) -> list[Any]:
        """Return widgets that are not always part of the row."""
        return [self._layout]

    def show(self, view: JobView) -> None:
        """Update the charts; sent at the throttle's next flushes."""
        if self._clock() < self._next_s:
            return
        before, self._drawn = self._drawn, charts(view)
        new = [widgets.HTML("", layout=self._layout) for _ in self._drawn[len(self.widget.children) :]]
        if new:
            self.widget.children = [*self.widget.children, *new]
        num_bytes = sum(MESSAGE_BYTES + len(chart) for chart in self._drawn if chart not in before)
        every_s = max(ROWS_S, num_bytes / _CHART_BYTES_S, len(view.ranks) * _CHART_S_PER_RANK)
        self._next_s = self._clock() + every_s
        # An attempt that has just started has fewer charts than the one before it.
        blocks = self.widget.children
        for block, chart in zip(
            blocks, [*self._drawn, *[""] * (len(blocks) - len(self._drawn))], strict=True
        ):
            self._throttle.update(block, every_s=every_s, value=in_style(chart) if chart else "")
