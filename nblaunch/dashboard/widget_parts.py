"""Parts of the panel: the rows of the ranks, charts, and the lines that ranks print.

    rank  state       progress      epoch       step  steps/s ...
     all  ● training  ▆▆▆▆______      2/6  450/1,000     24.1
    ▸ ranks 0-7 training, 24.1 steps/s each                                  a click shows each of them
    charts
    [All ranks] [rank 0] [rank 1] ...                                        a tab for all by time, one for each

The front end opens the line and switches tabs by itself, also while a cell runs and the kernel receives no clicks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import ipywidgets as widgets

from nblaunch.dashboard.charts import charts
from nblaunch.dashboard.html import MONO, Markup, row_key, rows_html, tiles_html
from nblaunch.dashboard.lines import LastLines
from nblaunch.dashboard.rows import Row
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
        self._built = ""
        self._built_fractions: Mapping[int, float] = {}
        self._fractions: Mapping[int, float] = {}

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
            self._show_rows(table, is_urgent=has_news)
        self._show_collapsed(table, is_urgent=has_news)

    def _show_rows(self, table: Table, *, is_urgent: bool) -> None:
        if self._rows.value == self._built:  # what was built last has been sent
            self._fractions = self._built_fractions
        self._built = in_style(
            rows_html(table, table.rows, Markup(is_inline=False, fractions=self._fractions))
        )
        self._built_fractions = _fractions(table.rows)
        self._throttle.update(self._rows, every_s=ROWS_S, is_urgent=is_urgent, value=self._built)

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
            self._throttle.update(self._expanded, every_s=every_s, value=in_style(_all_ranks(table)))


def _all_ranks(table: Table) -> str:
    markup = Markup(is_inline=False)
    return rows_html(table, table.expanded, markup) if table.expanded else tiles_html(table.tiles, markup)


def _fractions(rows: Sequence[Row]) -> Mapping[int, float]:
    return {row_key(row): row.fraction for row in rows if row.fraction is not None}


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


# --- lines ---------------------------------------------------------------------------------------------------------

MAX_TABS = 16
"""Largest number of ranks with tabs; with more ranks there is a list."""

MAX_LISTED = 64
"""Largest number of ranks in the list; with more ranks only the lines of all together are shown."""

_NUM_AT_ONCE = 8  # panes that are made in a tick
_LINE_LENGTH = 200
_SEEN_BYTES, _UNSEEN_BYTES = 3_500, 2_500  # of one tab, which is sent as a whole for each new line
_LOG_LINE_PX, _NUM_LINES = 17, 9  # the pane is a whole number of lines high, so that none is cut
_HEIGHT = f"{_LOG_LINE_PX * _NUM_LINES}px"
# Seconds between updates of the selected tab, and of the others times the number of ranks.
_SEEN_S, _UNSEEN_S = 0.9, 1.0
_PRE = (
    "margin:0;padding:0 2px;background:none;border:0;color:inherit;white-space:pre-wrap;overflow-wrap:anywhere;"
    f"{MONO};line-height:{_LOG_LINE_PX}px"
)

_TABS = "nbl-tabs"
TAB_SHEET = (
    # Of Lumino, and of Phosphor in front ends with ipywidgets 7.
    f'<style>.{_TABS} [class*="-TabBar-content"]{{flex-wrap:wrap}}'
    f'.{_TABS} [class*="-TabBar-tab"]{{flex:0 0 auto!important;min-width:0!important}}</style>'
)
"""Style sheet of the tabs: a cell that is too narrow for all has several lines of them."""


class LogPane:
    """The last lines of all ranks by time, and those of each rank.

    All tabs are kept up to date, since the front end switches them by itself. If there are too many ranks for tabs, a
    list selects the rank; it is linked in the front end too.
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
        self._next = -1
        self._width = len(str(num_ranks - 1))
        num_panes = 1 if num_ranks == 1 or num_ranks > MAX_LISTED else num_ranks + 1
        self._panes = [widgets.HTML(_NOTHING, layout=layout) for _ in range(num_panes)]
        if num_ranks == 1:
            self.widget = self._panes[0]
        elif num_ranks <= MAX_TABS:
            self.widget = self._pages = self._tabs()
        else:
            self.widget = self._list()

    def show(self) -> None:
        """Update the tabs; sent at the throttle's next flushes."""
        lines = [
            f'<span style="opacity:.7">[{rank:{self._width}}]</span> {escape(_cut(line))}'
            if self._num_ranks > 1
            else escape(_cut(line))
            for rank, line in self._last_lines.of_all()
        ]
        self._throttle.update(self._panes[0], every_s=_SEEN_S, value=_pane(lines, _SEEN_BYTES))
        # The kernel learns of a selected tab only when no cell runs, so this is a guess; all tabs are kept up to date.
        seen = getattr(self._pages, "selected_index", None)
        for _ in range(min(_NUM_AT_ONCE, len(self._panes) - 1)):
            self._next = (self._next + 1) % (len(self._panes) - 1)
            self._show_rank(self._next, is_seen=seen == self._next + 1)

    def _show_rank(self, rank: int, *, is_seen: bool) -> None:
        pane = self._panes[rank + 1]
        every_s = _SEEN_S if is_seen else _UNSEEN_S * self._num_ranks
        if self._throttle.is_due(pane, every_s):
            own = [escape(_cut(line)) for line in self._last_lines.of_rank(rank)]
            num_bytes = _SEEN_BYTES if is_seen else _UNSEEN_BYTES
            self._throttle.update(pane, every_s=every_s, value=_pane(own, num_bytes))

    def _titles(self) -> list[str]:
        return ["All ranks", *(f"rank {rank}" for rank in range(self._num_ranks))]

    def _tabs(self) -> Any:
        layout = widgets.Layout(margin="4px 0 0 0", width="100%")
        tab = widgets.Tab(children=self._panes, layout=layout, _dom_classes=(_TABS,))
        for index, title in enumerate(self._titles()):
            tab.set_title(index, title)
        tab.selected_index = 0
        return tab

    def _list(self) -> Any:
        stack = getattr(widgets, "Stack", None)  # new in ipywidgets 8
        if stack is None or self._num_ranks > MAX_LISTED:
            hint = widgets.HTML('<span style="opacity:.7">one rank alone: job.logs(rank)</span>')
            self._panes = self._panes[:1]
            return widgets.VBox([hint, *self._panes])
        chooser = widgets.Dropdown(options=self._titles(), index=0, layout=widgets.Layout(width="14em"))
        self._pages = pages = stack(children=self._panes, selected_index=0)
        self.links = [widgets.jslink((chooser, "index"), (pages, "selected_index"))]
        return widgets.VBox([chooser, pages])


_NOTHING = f'<pre style="{_PRE};opacity:.7">nothing printed yet</pre>'


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
