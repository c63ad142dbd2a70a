"""The live panel for a job: headline, buttons, rows, charts and logs, built from ipywidgets' core controls.

    ● train  running for 12 s on 4 processes (cpu, fork)              [Stacks] [Stop] [Interrupt] [Kill]
    rank  state       progress      epoch  step  ...
    failures, notices
    charts
    epochs    [All ranks] [rank 0] [rank 1] ...
    metrics, log folder

Only the values of widgets change, so nothing flickers. According to measurements with 8 and 512 ranks, a single HTML
widget would send one larger message a second instead of five smaller ones. Within the same byte budget, however, the
rows would be updated half as often, and each update would reset the tabs and all scroll positions.

This module needs ipywidgets (7.7 or 8), so it is imported only to open a panel. It uses neither JavaScript nor an
Output widget, which the front end would fill asynchronously.

The buttons are for jobs in the background. A click may arrive in any thread of the kernel (the main thread or a
subshell's); kernels without subshells handle it after the running cell has ended. A click sends a request to the job;
the panel shows the request at its next update.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from html import escape
from itertools import zip_longest
from time import monotonic
from typing import Any

import ipywidgets as widgets

from nblaunch.dashboard import html
from nblaunch.dashboard.base import Bundle
from nblaunch.dashboard.charts import LIVE_HEIGHT, charts
from nblaunch.dashboard.lines import LastLines
from nblaunch.dashboard.table import Table, tabulate
from nblaunch.dashboard.text import render_text
from nblaunch.dashboard.view import JobView
from nblaunch.dashboard.widget_throttle import Throttle
from nblaunch.events import Controls
from nblaunch.user_code import ipython_shell

# --- buttons ---------------------------------------------------------------------------------------------------------

_SURE_S = 5.0
_DOUBLE_CLICK_S = 0.5
_BUTTON_HEIGHT = "26px"
STOP_REQUESTED = (
    "stop requested: loops that check accelerator.should_stop end at the same step on every rank. To end "
    "any function, click Interrupt"
)
INTERRUPT_REQUESTED = "interrupted: finally blocks run, and then the workers exit"
KILL_REQUESTED = "killed"


class Buttons:
    """The buttons Stacks, Stop, Interrupt and Kill. Their positions and meanings never change."""

    def __init__(self, throttle: Throttle, clock: Callable[[], float] = monotonic) -> None:
        self._throttle = throttle
        self._clock = clock
        self._controls: Controls | None = None
        self._has_requested_stop = False
        self._kill_clicked_s = float("-inf")
        self.message = ""
        self.stacks = ""
        self._shown = widgets.Layout(width="auto", height=_BUTTON_HEIGHT, margin="0 0 0 6px")
        self._hidden = widgets.Layout(display="none")
        self._stop = self._button("Stop", "stop training at the same step on every rank", self._on_stop)
        self._kill = self._button("Kill", "kill every worker immediately", self._on_kill)
        self.widget = widgets.HBox(
            [
                self._button("Stacks", "show the Python stack of every rank", self._on_stacks),
                self._stop,
                self._button("Interrupt", "raise KeyboardInterrupt in every rank", self._on_interrupt),
                self._kill,
            ],
            layout=widgets.Layout(flex="0 0 auto", margin="0"),
        )

    @property
    def unused(self) -> list[Any]:
        """Widgets in the bar that are not always shown."""
        return [self._shown, self._hidden]

    def connect(self, controls: Controls) -> None:
        """Connect the buttons to a job, which makes them visible."""
        self._controls = controls

    def close(self) -> None:
        """Release the job, because the dashboard keeps the panel but must not keep the job's result in memory."""
        self._controls = None

    def show(self, *, is_running: bool) -> None:
        """Update the buttons; the throttle's next flush sends them."""
        layout = self._shown if is_running and self._controls is not None else self._hidden
        is_sure = self._clock() - self._kill_clicked_s < _SURE_S
        for button in self.widget.children:
            self._throttle.update(button, layout=layout, is_urgent=True)
        self._throttle.update(self._stop, disabled=self._has_requested_stop, is_urgent=True)
        kill, style = ("Confirm kill", "danger") if is_sure else ("Kill", "")
        self._throttle.update(self._kill, description=kill, button_style=style, is_urgent=True)

    def _button(self, name: str, tooltip: str, on_click: Callable[[Any], None]) -> Any:
        button = widgets.Button(description=name, tooltip=tooltip, layout=self._hidden)
        button.on_click(on_click)
        return button

    def _on_stacks(self, button: Any) -> None:
        if self._controls is not None:
            self.message, self.stacks = "collecting the stacks of all ranks", ""
            self._controls.ask_stacks().add_done_callback(self._receive_stacks)

    def _receive_stacks(self, reply: Future[str]) -> None:
        self.message, self.stacks = "stacks of the ranks:", reply.result()

    def _on_stop(self, button: Any) -> None:
        if self._controls is not None:
            self._has_requested_stop, self.message = True, STOP_REQUESTED
            self._controls.stop()

    def _on_interrupt(self, button: Any) -> None:
        if self._controls is not None:
            self.message = INTERRUPT_REQUESTED
            self._controls.interrupt()

    def _on_kill(self, button: Any) -> None:
        """Kill the job only on a second click that is not part of a double click, because unsaved progress is lost."""
        if self._controls is None:
            return
        since_s = self._clock() - self._kill_clicked_s
        if since_s >= _SURE_S:
            self._kill_clicked_s = self._clock()
        elif since_s >= _DOUBLE_CLICK_S:
            self.message = KILL_REQUESTED
            self._controls.cancel()


# --- charts ----------------------------------------------------------------------------------------------------------

ROWS_S = 0.3
"""Seconds between updates of the rows, if the throttle's budget allows."""

_CHART_S_PER_RANK = 0.003  # seconds between chart updates, per rank: drawing charts for 512 ranks takes 60 ms
_CHARTS_PX = LIVE_HEIGHT + 46  # height of a chart, including its text


class ChartRow:
    """The charts side by side. Each has its own widget, so only charts with new points are sent.

    The final number of charts is unknown, so the row scrolls if they need more room.
    """

    def __init__(self, throttle: Throttle, clock: Callable[[], float]) -> None:
        self._throttle = throttle
        self._clock = clock
        self._next_s = 0.0
        self._layout = widgets.Layout(margin="0", flex="0 0 auto")
        row = widgets.Layout(
            margin="0",
            flex_flow="row nowrap",
            flex="0 0 auto",
            width="100%",
            min_height=f"{_CHARTS_PX}px",
            overflow="auto hidden",
        )
        self.widget = widgets.HBox([], layout=row)

    @property
    def unused(self) -> list[Any]:
        """Widgets in the row that are not always shown."""
        return [self._layout]

    def show(self, view: JobView) -> None:
        """Update the charts; the throttle sends them in its next flushes.

        With more charts, each is updated less often.
        """
        if self._clock() < self._next_s:
            return
        drawn = charts(view)
        new = [widgets.HTML("", layout=self._layout) for _ in drawn[len(self.widget.children) :]]
        if new:
            self.widget.children = [*self.widget.children, *new]
        every_s = max(ROWS_S * len(drawn), len(view.ranks) * _CHART_S_PER_RANK)
        self._next_s = self._clock() + every_s
        # An attempt that has just started has fewer charts than the previous one.
        for block, chart in zip_longest(self.widget.children, drawn, fillvalue=""):
            self._throttle.update(block, every_s=every_s, value=in_style(chart) if chart else "")


# --- output of the ranks, in tabs ------------------------------------------------------------------------------------

MAX_TABS = 16
"""Maximum number of ranks with a tab of their own; with more, only the lines of all ranks together are shown."""

_LINE_LENGTH = 200
_SEEN_BYTES, _UNSEEN_BYTES = 3_500, 2_500  # of one tab; the whole tab is sent for each new line
_LOG_LINE_PX, _NUM_LINES = 17, 9  # the pane shows a whole number of lines, so that none is cut
_HEIGHT = f"{_LOG_LINE_PX * _NUM_LINES}px"
# Seconds between updates of the selected tab, and of each other tab. The latter is multiplied by the number of ranks.
_SEEN_S, _UNSEEN_S = 0.9, 1.0
_LOG_PRE = (
    "margin:0;padding:0 2px;background:none;border:0;color:inherit;white-space:pre-wrap;overflow-wrap:anywhere;"
    f"{html.MONO};line-height:{_LOG_LINE_PX}px"
)

_TABS = "nbl-tabs"
TAB_SHEET = (
    # Class names of Lumino, and of Phosphor in front ends with ipywidgets 7.
    f'<style>.{_TABS} [class*="-TabBar-content"]{{flex-wrap:wrap}}'
    f'.{_TABS} [class*="-TabBar-tab"]{{flex:0 0 auto!important;min-width:0!important}}</style>'
)
"""Style sheet of the tabs, which wrap in a narrow cell."""


class LogPane:
    """The last lines of all ranks together, in chronological order, and of each rank separately.

    All tabs are kept up to date, because the front end switches them itself.
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
        self.widget: Any
        self._pages: Any = None
        self._width = len(str(num_ranks - 1))
        pane_layout = widgets.Layout(flex="1 1 440px", min_width="0", margin="4px 0 0 0")
        num_panes = num_ranks + 1 if 1 < num_ranks <= MAX_TABS else 1
        self._panes = [widgets.HTML(_NOTHING, layout=layout) for _ in range(num_panes)]
        if num_ranks == 1:
            self.widget = widgets.VBox(self._panes, layout=pane_layout)
        elif num_ranks <= MAX_TABS:
            self.widget = self._pages = self._tabs(pane_layout)
        else:
            hint = widgets.HTML('<span style="opacity:.7">job.logs(rank) has the output of one rank</span>')
            self.widget = widgets.VBox([hint, *self._panes], layout=pane_layout)

    def show(self) -> None:
        """Update the tabs; the throttle sends them in its next flushes."""
        lines = [
            f'<span style="opacity:.7">[{rank:{self._width}}]</span> {escape(_cut(line))}'
            if self._num_ranks > 1
            else escape(_cut(line))
            for rank, line in self._last_lines.of_all()
        ]
        self._throttle.update(self._panes[0], every_s=_SEEN_S, value=_pane(lines, _SEEN_BYTES))
        # The kernel learns which tab is selected only when no cell is running, so this is a guess; all tabs are kept
        # up to date.
        seen = getattr(self._pages, "selected_index", None)
        for rank in range(len(self._panes) - 1):
            self._show_rank(rank, is_seen=seen == rank + 1)

    def _show_rank(self, rank: int, *, is_seen: bool) -> None:
        pane = self._panes[rank + 1]
        every_s = _SEEN_S if is_seen else _UNSEEN_S * self._num_ranks
        if self._throttle.is_due(pane, every_s):
            lines = [escape(_cut(line)) for line in self._last_lines.of_rank(rank)]
            num_bytes = _SEEN_BYTES if is_seen else _UNSEEN_BYTES
            self._throttle.update(pane, every_s=every_s, value=_pane(lines, num_bytes))

    def _tabs(self, layout: Any) -> Any:
        tab = widgets.Tab(children=self._panes, layout=layout, _dom_classes=(_TABS,))
        for index, title in enumerate(["All ranks", *(f"rank {rank}" for rank in range(self._num_ranks))]):
            tab.set_title(index, title)
        tab.selected_index = 0
        return tab


_NOTHING = f'<pre style="{_LOG_PRE};opacity:.7">nothing printed yet</pre>'


def _pane(lines: list[str], num_bytes: int) -> str:
    """Return, as HTML, as many of the last ``lines`` as fit into ``num_bytes``."""
    if not lines:
        return _NOTHING
    size, first = 0, len(lines)
    while first > 0 and (size := size + len(lines[first - 1]) + 1) <= num_bytes:
        first -= 1
    return f'<pre style="{_LOG_PRE}">' + "\n".join(lines[min(first, len(lines) - 1) :]) + "</pre>"


def _cut(line: str) -> str:
    return line if len(line) <= _LINE_LENGTH else line[: _LINE_LENGTH - 1] + "…"


# --- the panel -------------------------------------------------------------------------------------------------------

_VIEW_TYPE = "application/vnd.jupyter.widget-view+json"
_PRE = (
    "margin:2px 0;padding:4px 8px;border-left:2px solid rgba(128,128,128,.3);background:none;color:inherit;"
    f"white-space:pre-wrap;{html.MONO};line-height:17px"
)
_MARKUP = html.Markup(is_inline=False)
_TITLE_S = 0.8
_ONE_LINE = "white-space:nowrap;overflow:hidden;text-overflow:ellipsis"
_DEAD = "jupyter-widgets-disconnected"
MAX_KEPT = 100
"""Maximum number of closed panels whose outermost widget stays in the kernel. Each takes a few kB plus its table."""

_AGAIN_S = (1.0, 3.0, 10.0, 20.0, 45.0, 100.0)
"""Times at which the state of a closed panel is sent again, in seconds after it was closed."""

_kept: deque[Any] = deque()  # outermost widgets, the oldest first


class Panel:
    """The widgets of one job."""

    def __init__(self, last_lines: LastLines, clock: Callable[[], float] = monotonic) -> None:
        self._last_lines = last_lines
        self._throttle = Throttle(clock=clock)
        self._shown = widgets.Layout(margin="2px 0", width="100%")
        self._hidden = widgets.Layout(display="none")
        self._title = widgets.HTML("starting", layout=widgets.Layout(flex="1 1 0", min_width="0", margin="0"))
        self._buttons = Buttons(self._throttle, clock)
        # All rows share one widget and one message, whatever the number of ranks.
        rows = widgets.Layout(margin="4px 0", width="100%", overflow="auto hidden")
        self._rows = widgets.HTML("", layout=rows, _dom_classes=("nbl-job",))
        self._states: list[tuple[str, str]] = []
        self._troubles = (False, False, False)
        self._charts = ChartRow(self._throttle, clock)
        self._remarks, self._epochs, self._footer = (widgets.HTML("", layout=self._hidden) for _ in range(3))
        self._logs: LogPane | None = None
        self._top = widgets.HBox(
            [self._title, self._buttons.widget], layout=widgets.Layout(align_items="center", width="100%")
        )
        name = f"nbl-panel-{os.urandom(6).hex()}"
        self._lasting = f"{name}-lasting"
        # If a page is reloaded after the kernel has died, front ends write an error in place of the panel: JupyterLab
        # writes "model not found", and the classic notebook writes three sentences.
        self._hiding_errors = (
            f"<style>:is(.jp-OutputArea, .output):has(.{self._lasting}) "
            ":is(.jp-OutputArea-output.jupyter-widgets, .jupyter-widgets-view):not(:has(*)){display:none}</style>"
        )
        # ipywidgets 8 marks a panel whose kernel has died.
        self._hiding = (
            f"<style>.{name}.{_DEAD}{{display:none}}"
            f"body:has(.{name}:not(.{_DEAD})) .{self._lasting}{{display:none}}</style>"
        )
        sheet = widgets.HTML(html.STYLE_SHEET + TAB_SHEET + self._hiding, layout=self._hidden)
        self._above = [sheet, self._top, self._rows, self._remarks]
        # Epochs and logs are side by side if there is room for both, which makes the panel shorter.
        lower = widgets.Layout(width="100%", flex_flow="row wrap", align_items="flex-start", margin="0")
        self._beside = widgets.Layout(flex="0 0 auto", margin="2px 24px 2px 0")
        self._lower = widgets.HBox([self._epochs], layout=lower)
        self._below = [self._lower, self._footer]
        self.root = widgets.VBox(
            [*self._above, *self._below],
            layout=widgets.Layout(width="100%", overflow="hidden"),
            _dom_classes=(name,),
        )

    def bundle(self, view: JobView) -> Bundle:
        """Return the output that shows the panel in a cell, with text for front ends without widgets."""
        table = tabulate(view)
        about = f"{table.name}: {table.headline} on {table.setting}" if view.is_started else "starting"
        spec = {"version_major": 2, "version_minor": 0, "model_id": self.root.model_id}
        return {_VIEW_TYPE: spec, "text/plain": about}

    def stand_in(self, view: JobView) -> Bundle:
        """Return the output that replaces the panel if its widgets are dead; it is hidden while they are alive."""
        table = tabulate(view)
        shown = html.render_html(view, table=table, is_last_known=True)
        return {
            "text/html": f'<div class="{self._lasting}">{self._hiding_errors}{shown}</div>',
            "text/plain": f"{render_text(view, table=table)}\n{html.last_known(view)}",
        }

    def connect(self, controls: Controls) -> None:
        """Connect the buttons to a background job; their row keeps its height while they are hidden."""
        self._top.layout.min_height = _BUTTON_HEIGHT
        self._buttons.connect(controls)

    def show(self, view: JobView, *, is_urgent: bool = False) -> None:
        """Update the widgets to ``view``, and add charts and lines once there are any.

        Args:
            view: the job.
            is_urgent: send all changes; otherwise, those that the throttle's budget allows.
        """
        table = tabulate(view)
        still = table.stall
        troubles = bool(table.failures), still is not None, still is not None and still.is_certain
        has_news, self._troubles = troubles != self._troubles, troubles
        # Keep a long title on one line, so that everything below keeps its place.
        title = f'<div style="{_ONE_LINE}">{html.title(view, table)}</div>'
        self._throttle.update(self._title, every_s=_TITLE_S, is_urgent=has_news, value=in_style(title))
        self._buttons.show(is_running=view.is_started and not view.is_over)
        self._show_rows(table)
        self._show_block(
            self._remarks,
            html.cards(table, is_over=view.is_over) + html.remarks(table) + self._replies(),
            is_urgent=True,
        )
        self._charts.show(view)
        self._show_block(self._epochs, html.epochs(table.epochs), every_s=1.0, shown=self._beside)
        self._show_block(self._footer, _footer(table) if view.is_started else "", every_s=1.0)
        if self._logs is None and view.is_started and not self._last_lines.is_empty:
            self._logs = LogPane(self._last_lines, len(view.ranks), self._throttle)
        if self._logs is not None:
            self._logs.show()
        self._throttle.flush(sends_all=is_urgent)
        if self._logs is not None and len(self._lower.children) == 1:
            self._lower.children = [self._epochs, self._logs.widget]
        figures = [self._charts.widget] if self._charts.widget.children else []
        parts = (*self._above, *figures, *self._below)
        if parts != self.root.children:
            self.root.children = parts

    def close(self, lasting: str | None) -> None:
        """Close the widgets; the kernel keeps at most the outermost one.

        A page that is reloaded while the job runs, or reopened after the job's end, has the panel in the cell's output.
        It can't replace the panel, because it does not know the display id. On such a page, the outermost widget shows
        ``lasting`` until :data:`MAX_KEPT` other panels are closed.

        Args:
            lasting: HTML to show on such pages; None = keep no widget.
        """
        self._buttons.close()
        parts = list(dict.fromkeys(self._all()))
        if lasting is not None:
            # The widget must be one of the panel's own: a reloaded page (ipywidgets 7) can't create a newer widget,
            # because it does not know that widget's layout, and would show nothing at all.
            self._title.value = lasting + self._hiding
            self.root.children = [self._title]
            kept = list(_with_parts(self.root))
            parts = [part for part in parts if part not in kept]
            _kept.append(self.root)
            _send_again_later(self.root)
        for part in parts:
            part.close()
        while len(_kept) > MAX_KEPT:
            for part in list(_with_parts(_kept.popleft())):
                part.close()

    def _show_rows(self, table: Table) -> None:
        """Update the rows; new states and ranks that differ are sent immediately."""
        states = [(row.label, row.state_text) for row in table.rows]
        has_news = states != self._states
        self._states = states
        if has_news or self._throttle.is_due(self._rows, ROWS_S):
            rows = in_style(html.rows_html(table, _MARKUP)) if table.rows else ""
            self._throttle.update(self._rows, every_s=ROWS_S, is_urgent=has_news, value=rows)

    def _show_block(
        self, block: Any, content: str, *, every_s: float = 0.0, is_urgent: bool = False, shown: Any = None
    ) -> None:
        value = in_style(content) if content else ""
        layout = (shown or self._shown) if content else self._hidden
        self._throttle.update(block, every_s=every_s, is_urgent=is_urgent, value=value, layout=layout)

    def _replies(self) -> str:
        """Return the result of the last click."""
        buttons = self._buttons
        message = f"<div>{escape(buttons.message)}</div>" if buttons.message else ""
        return message + (f'<pre style="{_PRE}">{escape(buttons.stacks)}</pre>' if buttons.stacks else "")

    def _all(self) -> Iterator[Any]:
        """Yield every widget of the panel, outermost first."""
        loose = [self._shown, self._hidden, self._beside, *self._charts.unused, *self._buttons.unused]
        for part in [self.root, self._lower, self._charts.widget, *loose]:
            yield from _with_parts(part)


def _send_again_later(root: Any) -> None:
    """Send the content of a closed panel again, for a page that was loading when the job ended.

    Such a page has already requested the states of all widgets. It drops messages to widgets that it has not created
    yet, and sends no message once all widgets exist.
    """
    loop: Any = getattr(getattr(ipython_shell(), "kernel", None), "io_loop", None)
    if loop is not None:
        for after_s in _AGAIN_S:
            loop.add_callback(loop.call_later, after_s, partial(_send_again, root))


def _send_again(root: Any) -> None:
    for part in root.children:
        part.send_state("value")
    root.send_state("children")


def in_style(content: str) -> str:
    """Return HTML in the style of the panel."""
    return f'<div style="font-size:13px;line-height:1.45;font-variant-numeric:tabular-nums">{content}</div>'


def _with_parts(widget: Any) -> Iterator[Any]:
    """Yield a widget, its layout, its style, and the same for its children."""
    yield widget
    for name in ("layout", "style"):
        part = getattr(widget, name, None)
        if isinstance(part, widgets.Widget):
            yield part
    for child in getattr(widget, "children", ()):
        yield from _with_parts(child)


def _footer(table: Table) -> str:
    logs = f"logs: {table.log_dir}" if table.log_dir else ""
    return html.line(table.metrics) + html.runs(table) + html.line(logs)
