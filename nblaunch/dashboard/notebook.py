"""The dashboard for notebooks: one cell output, updated in place through its display id.

It shows live widgets, or a table. Each table is complete (HTML and text), so a saved notebook keeps the last table,
even without widget state. Updates from any thread reach the output in all cells that show it. ipywidgets is imported
when the first panel is opened.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, final

from nblaunch import env
from nblaunch.dashboard.base import Bundle, Pace, ViewingDashboard, uptime
from nblaunch.dashboard.html import log_bundle, mimebundle
from nblaunch.dashboard.lines import TAIL_LENGTH, LastLines
from nblaunch.dashboard.text import render_text
from nblaunch.dashboard.view import JobView
from nblaunch.events import Controls, Event, InputAwaited, Note
from nblaunch.user_code import ipython_shell

if TYPE_CHECKING:
    from nblaunch.dashboard.widget_panel import Panel

_log = logging.getLogger(__name__)

# Seconds between updates of the output that remains if the kernel dies.
_FIRST_LASTING_S, _LASTING_S = 1.0, 5.0
_LASTING_BYTES_S = 1_500.0

WIDGETS_S = 0.2
"""Seconds between updates of widgets."""

Publish = Callable[[Bundle, str, bool], None]
"""``publish(bundle, display_id, is_update)``."""


class Output:
    """One output, which several cells can show.

    It has one display id per cell, because VS Code updates only the last of several outputs with the same id.

    Args:
        publish: default: through IPython.
    """

    def __init__(self, publish: Publish | None = None) -> None:
        self._publish = publish or publish_in_notebook
        self._name = f"nblaunch-{os.urandom(8).hex()}"
        self._display_ids: dict[str | None, str] = {}  # cell -> its display id
        # A background job updates the output in one thread while a cell shows it again in another.
        self._lock = threading.Lock()
        self.shown: Bundle | None = None

    def show(self, bundle: Bundle, *, is_final: bool = False) -> int:
        """Update the output to ``bundle``; the first call creates it in the running cell.

        Args:
            bundle: the content to show.
            is_final: no update follows; publish ``bundle`` even if the output already shows it.

        Returns:
            Number of cells in which ``bundle`` was published.
        """
        with self._lock:
            if bundle == self.shown and not is_final:
                return 0
            if self.shown is None:
                self._create(bundle)
                return 1
            self.shown = bundle
            for display_id in self._display_ids.values():
                self._publish(bundle, display_id, True)
            return len(self._display_ids)

    def show_again(self) -> bool:
        """Also show the output in the running cell; return False if it is empty or already shown there."""
        with self._lock:
            if self.shown is None or id_of_running_request() in self._display_ids:
                return False
            self._create(self.shown)
        return True

    def _create(self, bundle: Bundle) -> None:
        """Add the output to the running cell."""
        self.shown = bundle
        display_id = f"{self._name}-{len(self._display_ids)}"
        self._display_ids[id_of_running_request()] = display_id
        self._publish(bundle, display_id, False)


def publish_in_notebook(bundle: Bundle, display_id: str, is_update: bool) -> None:
    """Show or update an output through IPython."""
    from IPython.display import display, update_display

    if is_update:
        update_display(dict(bundle), display_id=display_id, raw=True)
    else:
        display(dict(bundle), display_id=display_id, raw=True)


def id_of_running_request() -> str | None:
    """Return the id of the request that started the running cell; None outside a kernel."""
    request = running_request()
    return request.get("header", {}).get("msg_id")


def running_request() -> Mapping[str, Any]:
    """Return the request that started the running cell, as sent by the front end; empty outside a kernel."""
    return getattr(ipython_shell(), "parent_header", None) or {}


def is_on_colab() -> bool:
    """Return whether this process runs on Colab, and not on Kaggle, whose images derive from Colab's.

    Source: Kaggle/kagglehub (env.py).
    """
    environ = env.snapshot()
    is_on_kaggle = environ.get("KAGGLE_KERNEL_RUN_TYPE") or environ.get("KAGGLE_URL_BASE")
    signs = ("COLAB_RELEASE_TAG", "COLAB_BACKEND_VERSION", "COLAB_JUPYTER_TRANSPORT")
    return not is_on_kaggle and any(environ.get(sign) for sign in signs)


@final
class NotebookDashboard(ViewingDashboard):
    """A job in a cell output: live widgets, which are replaced by a table at the end, or a table from the start.

    A short job publishes only its final table. If widgets fail, the table replaces them.

    A second output below the widgets holds the table, updated every few seconds. It is hidden while the widgets are
    alive; a saved notebook shows it if the kernel has died.

    Args:
        background: the cell returns while the job is still running. The output is then created here, in the cell's
            thread, and includes the last lines of all ranks, because text from another thread would appear in another
            cell. Widgets have buttons, because the kernel can receive clicks.
        has_widgets: show widgets while the job runs; ``is_html`` must be True.
        is_html: publish HTML and text; False: only text.
        is_watched: a user may be looking at the cell. The table then includes the last lines of output while the job
            runs, because lines printed below the table would push it out of sight.
        publish: default: through IPython.
        open_panel: creates the widgets; default: the panel of ``widget_panel.py``.
        clock: returns seconds on a clock that never jumps.
    """

    def __init__(
        self,
        *,
        background: bool = False,
        has_widgets: bool = False,
        is_html: bool = True,
        is_watched: bool = False,
        publish: Publish | None = None,
        open_panel: Callable[[LastLines], Panel] | None = None,
        clock: Callable[[], float] = uptime,
    ) -> None:
        super().__init__(_pace(has_widgets=has_widgets, background=background, clock=clock))
        self._is_background = background
        self._has_widgets = has_widgets
        self._is_html = is_html
        self._is_watched = is_watched
        self._output = Output(publish)
        self._open_panel = open_panel or _open_panel
        self._panel: Panel | None = None
        self._lasting = Output(publish)
        self._next_lasting_s = 0.0
        self._clock = clock
        self._last_lines = LastLines()
        if background:
            self._draw()

    def on_event(self, event: Event) -> None:
        super().on_event(event)
        if self._has_widgets or not isinstance(event, Note):  # the table has its own notes
            self._last_lines.add(event)
        if isinstance(event, InputAwaited):
            self._catch_up()
            if self._view.is_started and not self._is_closed:
                self._draw(is_urgent=True)

    def control(self, controls: Controls) -> None:
        if self._is_background and self._panel is not None:
            self._panel.connect(controls)

    def show_again(self) -> bool:
        is_new = self._output.show_again()
        if is_new:
            self._lasting.show_again()
        return is_new

    def _draw(self, *, is_urgent: bool = False) -> None:
        if self._has_widgets:
            try:
                self._show_panel(is_urgent)
            except Exception as error:
                self._give_up_widgets(error)
        if not self._has_widgets:
            self._show_table()

    def _draw_last(self, view: JobView) -> None:
        has_two = self._lasting.shown is not None
        table = self._table(view)
        if view.is_started or self._output.shown is not None:
            self._output.show(self._table(view, has_logs=False) if has_two else table, is_final=True)
        if has_two:  # an output can't be removed
            self._lasting.show(log_bundle(view), is_final=True)
        # The panel is closed after the output has been replaced, so that no empty output is visible.
        if self._panel is not None:
            # On Colab, don't keep the widget: Colab saves widgets in a form that GitHub does not show, and presumably
            # keeps a cell's output up to date even when no page is open.
            self._panel.close(None if is_on_colab() else table["text/html"])

    def _show_panel(self, is_urgent: bool) -> None:
        if self._panel is None:
            self._panel = self._open_panel(self._last_lines)
            self._panel.show(self._view)
            self._output.show(self._panel.bundle(self._view))
        else:
            self._panel.show(self._view, is_urgent=is_urgent)
        self._show_lasting(self._panel)
        self._pace.note_published()

    def _show_lasting(self, panel: Panel) -> None:
        """Update the output that the notebook still shows if this process dies."""
        now_s = self._clock()
        is_first = self._lasting.shown is None
        # A background job must create its outputs in the cell's thread, which makes the first call.
        is_early = is_first and not self._is_background and self._pace.elapsed_s < _FIRST_LASTING_S
        if is_early or now_s < self._next_lasting_s:
            return
        bundle = panel.stand_in(self._view)
        self._lasting.show(bundle)
        num_bytes = sum(map(len, bundle.values()))
        self._next_lasting_s = now_s + (
            _FIRST_LASTING_S if is_first else max(_LASTING_S, num_bytes / _LASTING_BYTES_S)
        )

    def _give_up_widgets(self, error: Exception) -> None:
        """Show the table in the same output from now on."""
        self._has_widgets = False
        if self._lasting.shown is not None:
            self._lasting.show(log_bundle(self._view))
        if isinstance(error, ImportError):
            _log.warning("the job is shown as HTML instead of widgets: %s (pip install ipywidgets)", error)
        else:
            _log.warning("ipywidgets failed; the job is shown as HTML instead", exc_info=True)

    def _show_table(self) -> None:
        table = self._table(self._view)
        num_cells = self._output.show(table)
        self._pace.note_published(num_cells * sum(map(len, table.values())))

    def _table(self, view: JobView, *, has_logs: bool = True) -> Bundle:
        has_lines = self._is_background or (self._is_watched and not view.is_over)
        tail = self._last_lines.of_all()[-TAIL_LENGTH:] if has_lines else None
        if self._is_html:
            return mimebundle(view, tail=tail, has_logs=has_logs)
        return {"text/plain": render_text(view, tail=tail)}


def _pace(*, has_widgets: bool, background: bool, clock: Callable[[], float]) -> Pace:
    first_s = 0.0 if background else 0.25
    if has_widgets:  # the panel itself limits what it sends
        return Pace(first_s=first_s, interval_s=WIDGETS_S, slow_s=WIDGETS_S, clock=clock)
    return Pace(first_s=first_s, clock=clock)


def _open_panel(last_lines: LastLines) -> Panel:
    from nblaunch.dashboard.widget_panel import Panel

    return Panel(last_lines)
