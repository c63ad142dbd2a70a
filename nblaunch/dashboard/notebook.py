"""The dashboard for notebooks: one output of a cell, updated in place through its display id.

Each update is complete (HTML and text), so that a saved notebook keeps the last one without widget state. Updates reach
the output from any thread, and in all cells that show it. While a cell runs, most kernels receive no clicks:
:class:`CellWatch` reports whether one runs.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any, final

from nblaunch.dashboard.base import Pace, ViewingDashboard
from nblaunch.dashboard.html import mimebundle
from nblaunch.dashboard.text import render_text
from nblaunch.dashboard.view import JobView

SHORT_S = 0.5
"""Seconds for which a cell may run before buttons are disabled; a click waits for a shorter cell."""


class CellWatch:
    """Tracks whether a cell of the kernel is running, from the current cell until it is closed.

    Args:
        shell: of IPython, in the thread of its cells; None = no cell ever runs.
        clock: monotonic seconds.
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


Bundle = Mapping[str, Any]
"""MIME type -> data, as in ``display(..., raw=True)``."""

Publish = Callable[[Bundle, str, bool], None]
"""``publish(bundle, display_id, is_update)``."""


NUM_LIVE_CELLS = 3
"""Number of cells in which an output is updated while a job runs: those that showed it last. Its end is in all."""


class Output:
    """One output, which several cells can show.

    It has a display id in each cell: VS Code updates of outputs with the same id only the one that was displayed last.

    Args:
        publish: default: through IPython.
    """

    def __init__(self, publish: Publish | None = None) -> None:
        self._publish = publish or publish_in_notebook
        self._name = f"nblaunch-{os.urandom(8).hex()}"
        self._display_ids: dict[str | None, str] = {}  # of each cell
        # A background job updates the output in one thread while a cell shows it again in another.
        self._lock = threading.Lock()
        self.shown: Bundle | None = None

    def show(self, bundle: Bundle, *, is_final: bool = False) -> int:
        """Update the output to ``bundle``; the first call creates it in the running cell.

        Args:
            bundle: what it shows.
            is_final: no update follows. It is then published even if the output is the same already.

        Returns:
            In how many cells it was published.
        """
        with self._lock:
            if bundle == self.shown and not is_final:
                return 0
            if self.shown is None:
                self._create(bundle)
                return 1
            self.shown = bundle
            display_ids = list(self._display_ids.values())
            updated = display_ids if is_final else display_ids[-NUM_LIVE_CELLS:]
            for display_id in updated:
                self._publish(bundle, display_id, True)
        return len(updated)

    def show_again(self) -> bool:
        """Show the output in the running cell as well; return False if it is empty or shown there already."""
        with self._lock:
            if self.shown is None or running_cell() in self._display_ids:
                return False
            self._create(self.shown)
        return True

    def _create(self, bundle: Bundle) -> None:
        """Add the output to the running cell."""
        self.shown = bundle
        display_id = f"{self._name}-{len(self._display_ids)}"
        self._display_ids[running_cell()] = display_id
        self._publish(bundle, display_id, False)


def publish_in_notebook(bundle: Bundle, display_id: str, is_update: bool) -> None:
    """Show or update an output through IPython."""
    from IPython.display import display, update_display

    if is_update:
        update_display(dict(bundle), display_id=display_id, raw=True)
    else:
        display(dict(bundle), display_id=display_id, raw=True)


def running_cell() -> str | None:
    """Return the id of the request that the current cell executes; None outside of a kernel."""
    request = running_request()
    return request.get("header", {}).get("msg_id")


def running_request() -> Mapping[str, Any]:
    """Return the request that the current cell executes, as sent by the front end; empty outside of a kernel."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = get_ipython() if get_ipython is not None else None
    return getattr(shell, "parent_header", None) or {}


@final
class NotebookDashboard(ViewingDashboard):
    """The table of a job in the output of a cell.

    Args:
        background: the cell returns while the job runs. The output is then created here, in the thread of the cell,
            and includes the last lines of all ranks: text printed by another thread would appear in another cell.
        is_html: publish HTML and text; text alone if False.
        is_watched: a user may be looking at the cell. The last lines of output are then part of the table while the job
            runs: printed below it, they would push it out of sight.
        publish: default: through IPython.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        background: bool = False,
        is_html: bool = True,
        is_watched: bool = False,
        publish: Publish | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        # A short job publishes its final table only.
        super().__init__(Pace(first_s=0.0 if background else 0.25, clock=clock))
        self._is_background = background
        self._is_html = is_html
        self._is_watched = is_watched
        self._output = Output(publish)
        self._drawn: tuple[JobView, int] | None = None
        if background:
            self._show(self._view)

    def show_again(self) -> bool:
        return self._output.show_again()

    def _draw(self) -> None:
        if self._may_differ():
            self._show(self._view)

    def _draw_last(self, view: JobView) -> None:
        if view.is_started or self._output.shown is not None:
            self._show(view, is_final=True)

    def _may_differ(self) -> bool:
        """Return whether the table may have changed: after an event, or in another second."""
        second = int(self._view.elapsed_s)
        last, self._drawn = self._drawn, (self._view, second)
        if last is None or last[1] != second or last[0].ranks is not self._view.ranks:
            return True
        return last[0].notes is not self._view.notes or last[0].tail is not self._view.tail

    def _show(self, view: JobView, *, is_final: bool = False) -> None:
        with_output = self._is_background or (self._is_watched and not view.is_over)
        if self._is_html:
            bundle: Bundle = mimebundle(view, with_output=with_output)
        else:
            bundle = {"text/plain": render_text(view, with_output=with_output)}
        if num_cells := self._output.show(bundle, is_final=is_final):
            self._pace.note_published(num_cells * sum(map(len, bundle.values())))
