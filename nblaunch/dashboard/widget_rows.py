"""Rows of the panel, one for each rank or for those that differ, and the charts side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ipywidgets as widgets

from nblaunch.dashboard.charts import charts
from nblaunch.dashboard.html import Markup, rows_html
from nblaunch.dashboard.table import Table
from nblaunch.dashboard.view import JobView
from nblaunch.dashboard.widget_throttle import MESSAGE_BYTES, Throttle


def in_style(content: str) -> str:
    """Return HTML in the style of the panel."""
    return f'<div style="font-size:13px;line-height:1.45;font-variant-numeric:tabular-nums">{content}</div>'


# --- rows ------------------------------------------------------------------------------------------------------------

ROWS_S = 0.3
"""Seconds between updates of the rows, where the budget of the throttle lasts for that."""

_MARKUP = Markup(is_inline=False)


class RankRows:
    """The rows of a job, one widget and one message: how many messages there are does not depend on the ranks."""

    def __init__(self, throttle: Throttle) -> None:
        self._throttle = throttle
        layout = widgets.Layout(margin="4px 0", width="100%", overflow="auto hidden")
        self.widget = widgets.HTML("", layout=layout, _dom_classes=("nbl-job",))
        self._states: list[tuple[str, str]] = []

    def show(self, table: Table) -> None:
        """Update the rows; sent at the throttle's next flushes."""
        states = [(row.label, row.state_text) for row in table.rows]
        has_news = states != self._states  # a new state, and a rank that differs, are sent at once
        self._states = states
        if has_news or self._throttle.is_due(self.widget, ROWS_S):
            rows = in_style(rows_html(table, _MARKUP))
            self._throttle.update(self.widget, every_s=ROWS_S, is_urgent=has_news, value=rows)


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
