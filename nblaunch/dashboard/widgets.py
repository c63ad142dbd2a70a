"""The dashboard with live widgets, which are replaced by HTML when the job has ended.

A job that ends at once opens no widgets. If widgets can't be created, the HTML table is used. ipywidgets is imported
when the first panel is opened.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import monotonic
from typing import Protocol, final

from nblaunch.dashboard.base import Controls, Pace, ViewingDashboard
from nblaunch.dashboard.html import mimebundle
from nblaunch.dashboard.lines import LastLines
from nblaunch.dashboard.notebook import Bundle, Output, Publish
from nblaunch.dashboard.view import JobView
from nblaunch.events import Event

_log = logging.getLogger(__name__)

INTERVAL_S = 0.2
"""Seconds between updates."""


class LivePanel(Protocol):
    """Widgets that show a job while it runs."""

    def bundle(self, view: JobView) -> Bundle:
        """Return the output that shows the panel in a cell."""

    def connect(self, controls: Controls) -> None:
        """Connect the buttons with the job."""

    def show(self, view: JobView) -> None:
        """Update the widgets to ``view``."""

    def close(self, lasting: str) -> None:
        """Replace the widgets by the HTML ``lasting`` and close them."""


@final
class WidgetsDashboard(ViewingDashboard):
    """Widgets of a job in the output of a cell.

    Args:
        background: the cell returns while the job runs. The widgets are then created here, in the thread of the cell,
            and have buttons, since the kernel can receive clicks.
        publish: default: through IPython.
        open_panel: creates the widgets; default: those of ``widget_panel.py``.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        background: bool = False,
        publish: Publish | None = None,
        open_panel: Callable[[LastLines], LivePanel] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        first_s = 0.0 if background else 0.25
        super().__init__(Pace(first_s=first_s, interval_s=INTERVAL_S, slow_s=INTERVAL_S, clock=clock))
        self._is_background = background
        self._output = Output(publish)
        self._open_panel = open_panel or _open_panel
        self._last_lines = LastLines()
        self._panel: LivePanel | None = None
        self._is_plain = False
        if background:
            self._show(self._view)

    def on_event(self, event: Event) -> None:
        super().on_event(event)
        self._last_lines.add(event)

    def control(self, controls: Controls) -> None:
        if self._is_background and self._panel is not None:
            self._panel.connect(controls)

    def show_again(self) -> bool:
        return self._output.show_again()

    def _draw(self) -> None:
        self._show(self._view)

    def _draw_last(self, view: JobView) -> None:
        lasting = mimebundle(view, with_output=self._is_background)
        if view.is_started or self._output.shown is not None:
            self._output.show(lasting, is_final=True)
        # After the output was replaced, so that no empty output is visible.
        if self._panel is not None:
            self._panel.close(lasting["text/html"])

    def _show(self, view: JobView) -> None:
        self._pace.note_published()
        if not self._is_plain:
            try:
                self._show_panel(view)
            except Exception as error:
                self._give_up(error)
        if self._is_plain:
            # What workers print is held back until the end of the cell, as the widgets would have shown it.
            self._output.show(mimebundle(view, with_output=True))

    def _show_panel(self, view: JobView) -> None:
        if self._panel is None:
            self._panel = self._open_panel(self._last_lines)
            self._panel.show(view)
            self._output.show(self._panel.bundle(view))
        else:
            self._panel.show(view)

    def _give_up(self, error: Exception) -> None:
        """Show HTML in the same output from now on, because widgets failed."""
        self._is_plain = True
        if isinstance(error, ImportError):
            _log.warning("the job is shown as HTML, without widgets: %s (pip install ipywidgets)", error)
        else:
            _log.warning("ipywidgets failed; the job is shown as HTML instead", exc_info=True)


def _open_panel(last_lines: LastLines) -> LivePanel:
    from nblaunch.dashboard.widget_panel import Panel

    return Panel(last_lines)
