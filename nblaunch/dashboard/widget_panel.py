"""The live panel of a job: headline, buttons, rows, charts and logs, made of ipywidgets' core controls.

    ● train  running for 12 s on 4 processes (cpu, fork)              [Stacks] [Stop] [Interrupt] [Kill]
    rank  state       progress      epoch  step  ...                         (widget_rows.py, with the charts)
    failures, notices, charts, epochs, metrics
    [All ranks] [rank 0] [rank 1] ...                                        (widget_logs.py)

The layout is made once and only values change, so that nothing flickers. Imported only when a panel is opened, since
it needs ipywidgets (7.7 or 8). There is no Output widget, which the front end fills asynchronously, and no JavaScript.

The buttons are for jobs in the background. A click may arrive in any thread of the kernel (the main thread or that of a
subshell); most kernels handle clicks only when no cell runs. So while a cell runs, the buttons are disabled and a
tooltip gives the reason. A click sends a request to the job; the panel shows it at its next update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from html import escape
from time import monotonic
from typing import Any

import ipywidgets as widgets
from IPython import get_ipython

from nblaunch.dashboard import html
from nblaunch.dashboard.base import Bundle, Controls
from nblaunch.dashboard.lines import LastLines
from nblaunch.dashboard.table import Table, tabulate
from nblaunch.dashboard.view import JobView
from nblaunch.dashboard.widget_logs import TAB_SHEET, LogPane
from nblaunch.dashboard.widget_rows import ChartRow, RankRows, in_style
from nblaunch.dashboard.widget_throttle import Throttle

_SURE_S = 5.0
_DOUBLE_CLICK_S = 0.5
_BUTTON_HEIGHT = "26px"
STOP_REQUESTED = (
    "stop requested: loops that check accelerator.should_stop end at the same step on every rank. "
    "Interrupt ends any other function as well"
)
INTERRUPT_REQUESTED = "interrupted: finally blocks run, then the workers end"
KILL_REQUESTED = "killed"
BUSY = "a cell is running; the kernel receives clicks only when it has ended"

SHORT_S = 0.5
"""Seconds for which a cell may run before buttons are disabled; a click waits for a shorter cell."""


class CellWatch:
    """Tracks whether a cell of the kernel is running, from the current cell until it is closed.

    Without a shell, no cell ever runs.
    """

    def __init__(self, shell: Any | None, clock: Callable[[], float] = monotonic) -> None:
        self._events = getattr(shell, "events", None)
        self._clock = clock
        self._since_s: float | None = None
        self._hooks = (("pre_run_cell", self._on_begin), ("post_run_cell", self._on_end))
        if self._events is not None:
            self._since_s = clock()
            for name, hook in self._hooks:
                self._events.register(name, hook)

    @property
    def is_busy(self) -> bool:
        """Return whether a cell has been running for at least :data:`SHORT_S`."""
        since_s = self._since_s
        return since_s is not None and self._clock() - since_s >= SHORT_S

    def close(self) -> None:
        """Unregister the hooks. Calls after the first do nothing."""
        events, self._events, self._since_s = self._events, None, None
        if events is not None:
            for name, hook in self._hooks:
                events.unregister(name, hook)

    def _on_begin(self, *info: Any) -> None:
        self._since_s = self._clock()

    def _on_end(self, *result: Any) -> None:
        self._since_s = None


class Buttons:
    """The buttons Stacks, Stop, Interrupt and Kill. Each keeps its place and its meaning."""

    def __init__(self, throttle: Throttle, clock: Callable[[], float] = monotonic) -> None:
        self._throttle = throttle
        self._clock = clock
        self._controls: Controls | None = None
        self._cells = CellWatch(None)
        self._tooltips: dict[Any, str] = {}
        self._has_requested_stop = False
        self._kill_clicked_s = float("-inf")
        self.message = ""
        self.stacks = ""
        self._shown = widgets.Layout(width="auto", height=_BUTTON_HEIGHT, margin="0 0 0 6px")
        self._hidden = widgets.Layout(display="none")
        self._stacks = self._button("Stacks", "show the Python stack of every rank", self._on_stacks)
        self._stop = self._button("Stop", "end training at the same step on every rank", self._on_stop)
        self._interrupt = self._button(
            "Interrupt", "raise KeyboardInterrupt in every rank", self._on_interrupt
        )
        self._kill = self._button("Kill", "end every worker at once", self._on_kill)
        self.widget = widgets.HBox(
            [self._stacks, self._stop, self._interrupt, self._kill],
            layout=widgets.Layout(flex="0 0 auto", margin="0"),
        )

    @property
    def unused(self) -> list[Any]:
        """Return widgets that are not always part of the bar."""
        return [self._shown, self._hidden]

    def connect(self, controls: Controls) -> None:
        """Connect the buttons with a job, which makes them visible. Called in the thread of a cell."""
        self._controls = controls
        self._cells.close()
        self._cells = CellWatch(get_ipython(), self._clock)

    def close(self) -> None:
        """Stop following cells, and give up the job: the panel stays for some seconds, and its result need not."""
        self._cells.close()
        self._controls = None

    def show(self, *, is_running: bool) -> None:
        """Update the buttons; sent at the throttle's next flush."""
        layout = self._shown if is_running and self._controls is not None else self._hidden
        is_sure = self._clock() - self._kill_clicked_s < _SURE_S
        kill = "Confirm kill" if is_sure else "Kill"
        style = "danger" if is_sure else ""
        is_busy = self._cells.is_busy
        for button, tooltip in self._tooltips.items():
            is_done = button is self._stop and self._has_requested_stop
            self._throttle.update(
                button,
                layout=layout,
                disabled=is_busy or is_done,
                tooltip=BUSY if is_busy else tooltip,
                is_urgent=True,
            )
        self._throttle.update(self._kill, description=kill, button_style=style, is_urgent=True)

    def _button(self, name: str, tooltip: str, on_click: Callable[[Any], None]) -> Any:
        button = widgets.Button(description=name, tooltip=tooltip, layout=self._hidden)
        button.on_click(on_click)
        self._tooltips[button] = tooltip
        return button

    def _on_stacks(self, button: Any) -> None:
        if self._controls is not None:
            self.message, self.stacks = "collecting the stacks of all ranks", ""
            self._controls.ask_stacks().add_done_callback(self._receive_stacks)

    def _receive_stacks(self, answer: Future[str]) -> None:
        self.message, self.stacks = "stacks of the ranks:", answer.result()

    def _on_stop(self, button: Any) -> None:
        if self._controls is not None:
            self._has_requested_stop, self.message = True, STOP_REQUESTED
            self._controls.stop()

    def _on_interrupt(self, button: Any) -> None:
        if self._controls is not None:
            self.message = INTERRUPT_REQUESTED
            self._controls.interrupt()

    def _on_kill(self, button: Any) -> None:
        """Kill the job at the second click, but not at a double click: progress since the last checkpoint is lost."""
        if self._controls is None:
            return
        since_s = self._clock() - self._kill_clicked_s
        if since_s >= _SURE_S:
            self._kill_clicked_s = self._clock()
        elif since_s >= _DOUBLE_CLICK_S:
            self.message = KILL_REQUESTED
            self._controls.cancel()


_VIEW_TYPE = "application/vnd.jupyter.widget-view+json"
_PRE = (
    "margin:2px 0;padding:4px 8px;border-left:2px solid rgba(128,128,128,.3);background:none;color:inherit;"
    f"white-space:pre-wrap;{html.MONO};line-height:17px"
)
_TITLE_S = 0.8
_REMARK_PX = 23  # a line of the remarks
KEPT_S = 5.0
"""Seconds for which a page that was reloaded while a cell ran may request the widgets after its end."""

_GATHERED_S = 2.0
"""Seconds for which blocks that are new wait for others, so that the panel grows once where ranks begin to train."""


class Root(widgets.VBox):
    """The outermost box, which counts requests for its whole state.

    A front end requests the state when a page is reloaded while the kernel runs. Such a page does not know the display
    id of the output with the panel, so that the output can't be replaced there.
    """

    num_state_requests = 0

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> Any:
        if key is None:
            self.num_state_requests += 1
        return super().get_state(key, drop_defaults)


class Panel:
    """The widgets of one job."""

    def __init__(self, last_lines: LastLines, clock: Callable[[], float] = monotonic) -> None:
        self._last_lines = last_lines
        self._clock = clock
        self._throttle = Throttle(clock=clock)
        self._shown = widgets.Layout(margin="2px 0", width="100%")
        self._hidden = widgets.Layout(display="none")
        self._title = widgets.HTML("starting", layout=widgets.Layout(flex="1 1 auto", margin="0"))
        self._buttons = Buttons(self._throttle, clock)
        self._rows = RankRows(self._throttle)
        self._charts = ChartRow(self._throttle, clock)
        self._remarks, self._epochs, self._footer = (widgets.HTML("", layout=self._hidden) for _ in range(3))
        self._logs: LogPane | None = None
        self._top = widgets.HBox(
            [self._title, self._buttons.widget], layout=widgets.Layout(align_items="center", width="100%")
        )
        sheet = widgets.HTML(html.STYLE_SHEET + TAB_SHEET, layout=self._hidden)
        self._above = [sheet, self._top, self._rows.widget, self._remarks]
        self.root = Root([*self._above, self._footer], layout=widgets.Layout(width="100%", overflow="hidden"))
        self._has_figures = False
        self._new_s: float | None = None  # when there was the first block that is not shown yet
        self._num_remarks = 0
        self._num_state_requests = self.root.num_state_requests

    def bundle(self, view: JobView) -> Bundle:
        """Return the output that shows the panel in a cell, with text for front ends without widgets."""
        table = tabulate(view)
        about = f"{table.name}: {table.headline} on {table.setting}" if view.is_started else "starting"
        later = 'The summary replaces this when the job has ended; dashboard="html" shows a table meanwhile.'
        spec = {"version_major": 2, "version_minor": 0, "model_id": self.root.model_id}
        return {_VIEW_TYPE: spec, "text/plain": f"{about}\n{later}"}

    def connect(self, controls: Controls) -> None:
        """Connect the buttons with a job in the background; their line is as high before they are visible."""
        self._top.layout.min_height = _BUTTON_HEIGHT
        self._buttons.connect(controls)

    def show(self, view: JobView) -> None:
        """Update the widgets to ``view`` within the throttle's budget."""
        table = tabulate(view)
        is_grown = self._grow(view, table)
        self._throttle.update(self._title, every_s=_TITLE_S, value=in_style(html.title(view, table)))
        self._buttons.show(is_running=view.is_started and not view.is_over)
        if table.rows:
            self._rows.show(table)
        self._show_block(self._remarks, self._remarks_of(table), is_urgent=True)
        if self._has_figures:
            self._charts.show(view)
            self._show_block(self._epochs, html.epochs(table.epochs), every_s=1.0, is_urgent=is_grown)
        self._show_block(self._footer, _footer(table) if view.is_started else "", every_s=1.0)
        if self._logs is not None:
            self._logs.show()
        self._throttle.flush()
        if is_grown:
            figures = [self._charts.widget, self._epochs] if self._has_figures else []
            logs = [self._logs.widget] if self._logs is not None else []
            self.root.children = [*self._above, *figures, self._footer, *logs]

    def _grow(self, view: JobView, table: Table) -> bool:
        """Add figures and lines where there are some now; return whether the panel has more blocks than before.

        Charts, epochs and the first line come within a short time of each other: all appear at once.
        """
        has_points = any(curve.num_seen > 1 for curve in view.curves.values())
        adds_figures = not self._has_figures and (bool(table.epochs.columns) or has_points)
        adds_logs = self._logs is None and view.is_started and not self._last_lines.is_empty
        if not adds_figures and not adds_logs:
            return False
        if self._new_s is None:
            self._new_s = self._clock()
        if self._clock() - self._new_s < _GATHERED_S:
            return False
        self._new_s = None
        self._has_figures = self._has_figures or adds_figures
        if adds_logs:
            self._logs = LogPane(self._last_lines, len(view.ranks), self._throttle)
        return True

    def close(self, lasting: str) -> None:
        """Close all widgets, so that nothing of them stays in the kernel or the notebook.

        If a page was reloaded meanwhile, its output can't be replaced; there the root widget shows ``lasting`` (HTML).
        While a cell runs, the kernel does not learn of such a page, so the root widget stays for some seconds after
        the cell has ended, and for good if a page requests its state.
        """
        self._buttons.close()
        parts = list(dict.fromkeys(self._all()))
        # A widget that is as old as the panel: a page that was reloaded can't create a new one, whose layout it would
        # have to know already, and would then show none at all (ipywidgets 7).
        self._title.value = lasting
        self.root.children = [self._title]
        kept = list(_with_parts(self.root))
        parts = [part for part in parts if part not in kept]
        for part in parts:
            part.close()
        _when_idle_for(KEPT_S, self._close_root)

    def _close_root(self) -> None:
        if self.root.num_state_requests == self._num_state_requests:
            for part in dict.fromkeys(_with_parts(self.root)):
                part.close()

    def _show_block(self, block: Any, content: str, *, every_s: float = 0.0, is_urgent: bool = False) -> None:
        value = in_style(content) if content else ""
        layout = self._shown if content else self._hidden
        self._throttle.update(block, every_s=every_s, is_urgent=is_urgent, value=value, layout=layout)

    def _remarks_of(self, table: Table) -> str:
        """Return remarks and answers. Their block never shrinks, since a notice that goes would move what is below."""
        num_lines = len(table.failures) + len(table.warnings)
        num_lines += sum(1 + len(notice.lines) for notice in table.notices)
        self._num_remarks = max(self._num_remarks, num_lines)
        if not self._num_remarks:
            return self._answers()
        height = f"min-height:{_REMARK_PX * self._num_remarks}px"
        return f'<div style="{height}">{html.remarks(table)}</div>{self._answers()}'

    def _answers(self) -> str:
        """Return the result of the last click."""
        buttons = self._buttons
        message = f"<div>{escape(buttons.message)}</div>" if buttons.message else ""
        return message + (f'<pre style="{_PRE}">{escape(buttons.stacks)}</pre>' if buttons.stacks else "")

    def _all(self) -> Iterator[Any]:
        """Yield every widget of the panel, outermost first."""
        loose = [self._shown, self._hidden, *self._charts.unused, *self._buttons.unused]
        for part in [self.root, self._charts.widget, self._epochs, *loose]:
            yield from _with_parts(part)


def _when_idle_for(seconds: float, call: Callable[[], None]) -> None:
    """Call in the kernel's event loop, which runs while no cell does; at once where there is none. From any thread."""
    loop = getattr(getattr(get_ipython(), "kernel", None), "io_loop", None)
    if loop is None:
        call()
    else:
        loop.add_callback(loop.call_later, seconds, call)


def _with_parts(widget: Any) -> Iterator[Any]:
    """Yield a widget, its layout, its style, and the same of its children."""
    yield widget
    for name in ("layout", "style"):
        part = getattr(widget, name, None)
        if isinstance(part, widgets.Widget):
            yield part
    for child in getattr(widget, "children", ()):
        yield from _with_parts(child)


def _footer(table: Table) -> str:
    logs = f"logs: {table.log_dir}" if table.log_dir else ""
    return html.line(table.metrics) + html.line(logs)
