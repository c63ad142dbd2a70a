"""The live panel of a job, made of ipywidgets' core controls: all of it, from the headline to the logs.

    ● train  running for 12 s on 4 processes (cpu, fork)              [Stacks] [Stop] [Kill]
    rank  state      progress      epoch  step  ...                          (widget_ranks.py)
    grid of further ranks, failures, notices, charts, metrics, memory
    [all by time] [rank 0] [rank 1] ...

One layout, made once: afterwards values change, so that nothing flickers. Imported only when a panel is opened, since
it needs ipywidgets. Works with ipywidgets 7.7 and 8; no Output widget (the front end fills it, in its own time), no
code that runs in the front end.

The buttons are for jobs in the background. A click may arrive in any thread of the kernel (the main one, a
subshell's), and late: only when no cell runs, on most kernels. So while one runs, nothing can be clicked, and a tooltip
says why. A click sends a request to the job, which wakes its own thread; the panel draws it at its next tick.
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
from nblaunch.dashboard.base import Controls
from nblaunch.dashboard.html import charts
from nblaunch.dashboard.lines import LogBook
from nblaunch.dashboard.notebook import Bundle, CellWatch
from nblaunch.dashboard.table import Table, tabulate
from nblaunch.dashboard.view import JobView
from nblaunch.dashboard.widget_ranks import NUMBERS, LogPane, RowGrid
from nblaunch.dashboard.widget_throttle import Throttle

_SURE_S = 5.0
STOP_REQUESTED = (
    "asked to stop: loops that look at accelerator.should_stop end at the same step on every rank. "
    "Interrupt ends any other function, too"
)
INTERRUPT_REQUESTED = "interrupted: finally blocks run, then the workers end"
KILL_REQUESTED = "killed"
BUSY = "a cell is running, and clicks reach the kernel only when it has ended"


class Buttons:
    """Stacks, Stop and Kill.

    Args:
        throttle: through which they change.
        clock: seconds on a clock that never jumps.
    """

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
        self._shown = widgets.Layout(width="auto", height="26px", margin="0 0 0 6px")
        self._hidden = widgets.Layout(display="none")
        self._stacks = self._button("Stacks", "where every rank is right now", self._on_stacks)
        self._stop = self._button("Stop", "let training end early and well", self._on_stop)
        self._kill = self._button("Kill", "end every worker at once", self._on_kill)
        self.widget = widgets.HBox(
            [self._stacks, self._stop, self._kill], layout=widgets.Layout(flex="0 0 auto", margin="0")
        )

    @property
    def unused(self) -> list[Any]:
        """Widgets that are made but not always part of the bar."""
        return [self._shown, self._hidden]

    def connect(self, controls: Controls) -> None:
        """From now on a click does something, so the buttons may be shown. Called in the thread of a cell."""
        self._controls = controls
        self._cells.close()
        self._cells = CellWatch(get_ipython(), self._clock)

    def close(self) -> None:
        """Nothing can be clicked any more."""
        self._cells.close()

    def show(self, *, is_running: bool) -> None:
        """Draw what was clicked; sent at the throttle's next flush."""
        layout = self._shown if is_running and self._controls is not None else self._hidden
        is_sure = self._clock() - self._kill_clicked_s < _SURE_S
        stop = "Interrupt" if self._has_requested_stop else "Stop"
        kill = "Kill: sure?" if is_sure else "Kill"
        style = "danger" if is_sure else ""
        for button, tooltip in self._tooltips.items():
            is_busy = self._cells.is_busy
            self._throttle.update(
                button, disabled=is_busy, tooltip=BUSY if is_busy else tooltip, is_urgent=True
            )
        self._throttle.update(self._stacks, layout=layout, is_urgent=True)
        self._throttle.update(self._stop, layout=layout, description=stop, is_urgent=True)
        self._throttle.update(self._kill, layout=layout, description=kill, button_style=style, is_urgent=True)

    def _button(self, name: str, tooltip: str, on_click: Callable[[Any], None]) -> Any:
        button = widgets.Button(description=name, tooltip=tooltip, layout=self._hidden)
        button.on_click(on_click)
        self._tooltips[button] = tooltip
        return button

    def _on_stacks(self, button: Any) -> None:
        if self._controls is not None:
            self.message, self.stacks = "asking every rank where it is", ""
            self._controls.ask_stacks().add_done_callback(self._take_stacks)

    def _take_stacks(self, answer: Future[str]) -> None:
        self.message, self.stacks = "where the ranks are:", answer.result()

    def _on_stop(self, button: Any) -> None:
        if self._controls is None:
            return
        if self._has_requested_stop:
            self.message = INTERRUPT_REQUESTED
            self._controls.interrupt()
        else:
            self._has_requested_stop, self.message = True, STOP_REQUESTED
            self._controls.stop()

    def _on_kill(self, button: Any) -> None:
        """The first click asks whether that is meant: what was trained since the last checkpoint is lost."""
        if self._controls is None:
            return
        if self._clock() - self._kill_clicked_s < _SURE_S:
            self.message = KILL_REQUESTED
            self._controls.cancel()
        self._kill_clicked_s = self._clock()


_VIEW_TYPE = "application/vnd.jupyter.widget-view+json"
_STYLE = "font-size:13px;line-height:1.45;font-variant-numeric:tabular-nums"
_PRE = (
    "margin:2px 0;padding:4px 8px;border-left:2px solid rgba(128,128,128,.3);background:none;color:inherit;"
    "white-space:pre-wrap;font-family:ui-monospace,Menlo,Consolas,'DejaVu Sans Mono',monospace;font-size:12px;"
    "line-height:17px"
)
_TITLE_S, _CHART_S, _GRID_S = 0.8, 4.0, 1.0
_FIRST_CHART_S = 3.0  # of a curve that just began there is nothing to see


class Root(widgets.VBox):
    """The outermost box. Knows whether its whole state was asked for after it was made.

    A front end asks when a page is opened anew while the kernel runs. Such a page does not know the display id of the
    output that the panel stands in, so that output can't be replaced there.
    """

    num_state_requests = 0

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> Any:
        if key is None:
            self.num_state_requests += 1
        return super().get_state(key, drop_defaults)


class Panel:
    """The widgets of one job.

    Args:
        book: what the ranks print.
        clock: seconds on a clock that never jumps.
    """

    def __init__(self, book: LogBook, clock: Callable[[], float] = monotonic) -> None:
        self._book = book
        self._throttle = Throttle(clock=clock)
        self._shown = widgets.Layout(margin="2px 0", width="100%")
        self._hidden = widgets.Layout(display="none")
        self._title = widgets.HTML("starting", layout=widgets.Layout(flex="1 1 auto", margin="0"))
        self._buttons = Buttons(self._throttle, clock)
        self._rows = RowGrid(self._throttle)
        self._grid, self._remarks, self._charts, self._footer = (self._block() for _ in range(4))
        self._logs: LogPane | None = None
        top = widgets.HBox(
            [self._title, self._buttons.widget], layout=widgets.Layout(align_items="center", width="100%")
        )
        self._blocks = [top, self._rows.widget, self._grid, self._remarks, self._charts, self._footer]
        self.root = Root(self._blocks, layout=widgets.Layout(width="100%", overflow="hidden"))
        self._num_state_requests = self.root.num_state_requests

    def bundle(self, view: JobView) -> Bundle:
        """What a cell shows: the widgets, and words for front ends without them."""
        table = tabulate(view)
        about = f"{table.name}: {table.headline} on {table.setting}" if view.is_started else "starting"
        spec = {"version_major": 2, "version_minor": 0, "model_id": self.root.model_id}
        return {_VIEW_TYPE: spec, "text/plain": f"{about}\nThe summary replaces this when the job has ended."}

    def connect(self, controls: Controls) -> None:
        """Connect the buttons with a job in the background."""
        self._buttons.connect(controls)

    def show(self, view: JobView) -> None:
        """Bring the widgets up to ``view``, as far as the budget of messages goes."""
        table = tabulate(view)
        if view.is_started and self._logs is None:
            self._logs = LogPane(self._book, view.num_processes, self._throttle)
            self.root.children = [*self._blocks, self._logs.widget]
        title = f'<div style="{_STYLE}">{html.title(view, table)}</div>'
        # It shows the same rates as the rows, and at the same time.
        self._throttle.update(self._title, every_s=_TITLE_S, group=NUMBERS, value=title)
        self._buttons.show(is_running=view.is_started and not view.is_over)
        self._show_ranks(table)
        self._show_block(self._remarks, html.remarks(table) + self._answers(), is_urgent=True)
        if self._throttle.is_due(self._charts, _CHART_S):
            drawn = charts(view) if view.elapsed_s >= _FIRST_CHART_S else ""
            self._show_block(self._charts, drawn, every_s=_CHART_S)
        self._show_block(self._footer, _footer(table), every_s=1.0)
        if self._logs is not None:
            self._logs.show()
        self._throttle.flush()

    def _show_ranks(self, table: Table) -> None:
        """A row of widgets for each rank; of many, the extremes and a grid of the others, in one piece of HTML.

        Which ranks are extremes changes all the time, and rows that mix the numbers of two ranks
        would be worse than none.
        """
        if not table.grid:
            self._rows.show(table)
        elif self._throttle.is_due(self._grid, _GRID_S):
            self._show_block(self._grid, html.table_of(table) + html.grid(table.grid), every_s=_GRID_S)

    def close(self, lasting: str) -> None:
        """Take the widgets away: nothing of them stays in the kernel or the notebook.

        Unless a page was opened anew meanwhile: there, where the output can't be replaced, the widgets turn into
        ``lasting`` (HTML).
        """
        self._buttons.close()
        parts = list(dict.fromkeys(self._all()))
        if self.root.num_state_requests > self._num_state_requests:
            parts = [part for part in parts if part not in (self.root, self.root.layout)]
            self.root.children = [widgets.HTML(lasting, layout=self.root.layout)]
        for part in parts:
            part.close()

    def _block(self) -> Any:
        return widgets.HTML("", layout=self._hidden)

    def _show_block(self, block: Any, content: str, *, every_s: float = 0.0, is_urgent: bool = False) -> None:
        value = f'<div style="{_STYLE}">{content}</div>' if content else ""
        layout = self._shown if content else self._hidden
        self._throttle.update(block, every_s=every_s, is_urgent=is_urgent, value=value, layout=layout)

    def _answers(self) -> str:
        """What came of the last click."""
        buttons = self._buttons
        message = f"<div>{escape(buttons.message)}</div>" if buttons.message else ""
        return message + (f'<pre style="{_PRE}">{escape(buttons.stacks)}</pre>' if buttons.stacks else "")

    def _all(self) -> Iterator[Any]:
        """Every widget of the panel, from the outside to the inside."""
        loose = [self._shown, self._hidden, *self._rows.unused, *self._buttons.unused]
        links = self._logs.links if self._logs is not None else []
        for part in [*links, self.root, *loose]:
            yield from _with_parts(part)


def _with_parts(widget: Any) -> Iterator[Any]:
    """A widget, its layout, its style, and all that for what it contains."""
    yield widget
    for name in ("layout", "style"):
        part = getattr(widget, name, None)
        if isinstance(part, widgets.Widget):
            yield part
    for child in getattr(widget, "children", ()):
        yield from _with_parts(child)


def _footer(table: Table) -> str:
    lines = [table.metrics, table.memory, f"logs: {table.log_dir}" if table.log_dir else ""]
    return "".join(html.line(line) for line in lines if line)
