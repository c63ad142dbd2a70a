"""The live panel of a job, made of ipywidgets' core controls: all of it, from the headline to the logs.

    ● train  running for 12 s on 4 processes (cpu, fork)              [Stacks] [Stop] [Kill]
    rank  state      progress      epoch  step  ...                          (widget_rows.py)
    grid of further ranks, failures, notices, charts, metrics, memory
    [all by time] [rank 0] [rank 1] ...                                      (widget_logs.py)

One layout, made once: afterwards values change, so that nothing flickers. Imported only when a panel is opened, since
it needs ipywidgets. Works with ipywidgets 7.7 and 8; no Output widget (the front end fills it, in its own time), no
code that runs in the front end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from html import escape
from time import monotonic
from typing import Any

import ipywidgets as widgets

from nblaunch.dashboard import html
from nblaunch.dashboard.base import Controls
from nblaunch.dashboard.chart import charts
from nblaunch.dashboard.logbook import LogBook
from nblaunch.dashboard.output import Bundle
from nblaunch.dashboard.table import Table, tabulate
from nblaunch.dashboard.view import JobView
from nblaunch.dashboard.widget_buttons import Buttons
from nblaunch.dashboard.widget_logs import LogPane
from nblaunch.dashboard.widget_rows import NUMBERS, RowGrid
from nblaunch.dashboard.widget_valve import Valve

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

    num_states_told = 0

    def get_state(self, key: Any = None, drop_defaults: bool = False) -> Any:
        if key is None:
            self.num_states_told += 1
        return super().get_state(key, drop_defaults)


class Panel:
    """The widgets of one job.

    Args:
        book: what the ranks print.
        clock: seconds on a clock that never jumps.
    """

    def __init__(self, book: LogBook, clock: Callable[[], float] = monotonic) -> None:
        self._book = book
        self._valve = Valve(clock=clock)
        self._shown = widgets.Layout(margin="2px 0", width="100%")
        self._hidden = widgets.Layout(display="none")
        self._title = widgets.HTML("starting", layout=widgets.Layout(flex="1 1 auto", margin="0"))
        self._buttons = Buttons(self._valve, clock)
        self._rows = RowGrid(self._valve)
        self._grid, self._remarks, self._charts, self._footer = (self._block() for _ in range(4))
        self._logs: LogPane | None = None
        top = widgets.HBox(
            [self._title, self._buttons.widget], layout=widgets.Layout(align_items="center", width="100%")
        )
        self._blocks = [top, self._rows.widget, self._grid, self._remarks, self._charts, self._footer]
        self.root = Root(self._blocks, layout=widgets.Layout(width="100%", overflow="hidden"))
        self._num_states_told = self.root.num_states_told

    def bundle(self, view: JobView) -> Bundle:
        """What a cell shows: the widgets, and words for front ends without them."""
        table = tabulate(view)
        about = f"{table.name}: {table.headline} on {table.setting}" if view.is_started else "starting"
        spec = {"version_major": 2, "version_minor": 0, "model_id": self.root.model_id}
        return {_VIEW_TYPE: spec, "text/plain": f"{about}\nThe summary replaces this when the job has ended."}

    def connect(self, controls: Controls) -> None:
        """Let the buttons act on a job that nobody waits for."""
        self._buttons.connect(controls)

    def show(self, view: JobView) -> None:
        """Bring the widgets up to ``view``, as far as the budget of messages goes."""
        table = tabulate(view)
        if view.is_started and self._logs is None:
            self._logs = LogPane(self._book, view.num_processes, self._valve)
            self.root.children = [*self._blocks, self._logs.widget]
        title = f'<div style="{_STYLE}">{html.title(view, table)}</div>'
        # It tells of the same rates as the rows, and at the same time.
        self._valve.want(self._title, every_s=_TITLE_S, group=NUMBERS, value=title)
        self._buttons.show(is_running=view.is_started and not view.is_over)
        self._show_ranks(table)
        self._show_block(self._remarks, html.remarks(table) + self._answers(), is_urgent=True)
        if self._valve.is_due(self._charts, _CHART_S):
            drawn = charts(view) if view.elapsed_s >= _FIRST_CHART_S else ""
            self._show_block(self._charts, drawn, every_s=_CHART_S)
        self._show_block(self._footer, _footer(table), every_s=1.0)
        if self._logs is not None:
            self._logs.show()
        self._valve.flush()

    def _show_ranks(self, table: Table) -> None:
        """A row of widgets for each rank; of many, the extremes and a grid of the others, in one piece of HTML.

        Which ranks are extremes changes all the time, and rows of which some parts tell of one rank and some of another
        would be worse than none.
        """
        if not table.grid:
            self._rows.show(table)
        elif self._valve.is_due(self._grid, _GRID_S):
            self._show_block(self._grid, html.table_of(table) + html.grid(table.grid), every_s=_GRID_S)

    def close(self, lasting: str) -> None:
        """Take the widgets away: nothing of them stays in the kernel or the notebook.

        Unless a page was opened anew meanwhile: there, where the output can't be replaced, the widgets turn into
        ``lasting`` (HTML).
        """
        self._buttons.close()
        parts = list(dict.fromkeys(self._all()))
        if self.root.num_states_told > self._num_states_told:
            parts = [part for part in parts if part not in (self.root, self.root.layout)]
            self.root.children = [widgets.HTML(lasting, layout=self.root.layout)]
        for part in parts:
            part.close()

    def _block(self) -> Any:
        return widgets.HTML("", layout=self._hidden)

    def _show_block(self, block: Any, content: str, *, every_s: float = 0.0, is_urgent: bool = False) -> None:
        value = f'<div style="{_STYLE}">{content}</div>' if content else ""
        layout = self._shown if content else self._hidden
        self._valve.want(block, every_s=every_s, is_urgent=is_urgent, value=value, layout=layout)

    def _answers(self) -> str:
        """What came of the last click."""
        buttons = self._buttons
        told = f"<div>{escape(buttons.message)}</div>" if buttons.message else ""
        return told + (f'<pre style="{_PRE}">{escape(buttons.stacks)}</pre>' if buttons.stacks else "")

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
