"""The output of the ranks in tabs of the panel: one for all ranks in chronological order, and one per rank.

    [All ranks] [rank 0] [rank 1] ...

The front end switches tabs itself, even while a cell runs and the kernel receives no clicks.
"""

from __future__ import annotations

from html import escape
from typing import Any

import ipywidgets as widgets

from nblaunch.dashboard.html import MONO
from nblaunch.dashboard.lines import LastLines
from nblaunch.dashboard.widget_throttle import Throttle

MAX_TABS = 16
"""Maximum number of ranks with a tab of their own; with more, only the lines of all ranks together are shown."""

_LINE_LENGTH = 200
_SEEN_BYTES, _UNSEEN_BYTES = 3_500, 2_500  # of one tab; each new line sends the whole tab
_LOG_LINE_PX, _NUM_LINES = 17, 9  # the pane shows a whole number of lines, so that none is cut
_HEIGHT = f"{_LOG_LINE_PX * _NUM_LINES}px"
# Seconds between updates of the selected tab, and of each other tab. The latter is multiplied by the number of ranks.
_SEEN_S, _UNSEEN_S = 0.9, 1.0
_PRE = (
    "margin:0;padding:0 2px;background:none;border:0;color:inherit;white-space:pre-wrap;overflow-wrap:anywhere;"
    f"{MONO};line-height:{_LOG_LINE_PX}px"
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


_NOTHING = f'<pre style="{_PRE};opacity:.7">nothing printed yet</pre>'


def _pane(lines: list[str], num_bytes: int) -> str:
    """Return, as HTML, as many of the last ``lines`` as fit into ``num_bytes``."""
    if not lines:
        return _NOTHING
    size, first = 0, len(lines)
    while first > 0 and (size := size + len(lines[first - 1]) + 1) <= num_bytes:
        first -= 1
    return f'<pre style="{_PRE}">' + "\n".join(lines[min(first, len(lines) - 1) :]) + "</pre>"


def _cut(line: str) -> str:
    return line if len(line) <= _LINE_LENGTH else line[: _LINE_LENGTH - 1] + "…"
