"""A job in a notebook as widgets while it runs, and as one lasting output afterwards.

Owns when they are opened, updated and replaced. A job that is over in a moment never opens any. Where they can't be
made, the HTML table takes their place: the job goes on. Imports nothing of ipywidgets before it opens the first panel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol, final

from nblaunch.dashboard.base import Controls, Dashboard, Pace
from nblaunch.dashboard.html import mimebundle
from nblaunch.dashboard.logbook import LogBook
from nblaunch.dashboard.output import Bundle, Output, Publish
from nblaunch.dashboard.text import broken_off
from nblaunch.dashboard.view import JobView
from nblaunch.dashboard.view_events import fold
from nblaunch.dashboard.view_samples import fold_samples
from nblaunch.events import Event, JobStarted
from nblaunch.wire.board import Sample

_log = logging.getLogger(__name__)

INTERVAL_S = 0.2
"""Seconds between two updates."""


class LivePanel(Protocol):
    """What shows a job while it runs."""

    def bundle(self, view: JobView) -> Bundle: ...

    def connect(self, controls: Controls) -> None: ...

    def show(self, view: JobView) -> None: ...

    def close(self, lasting: str) -> None: ...


@final
class WidgetsDashboard(Dashboard):
    """A job as widgets, shown through one display id.

    Args:
        background: the cell returns while the job runs. The widgets are then made here, in the thread of the cell, and
            have buttons, since clicks can arrive.
        publish: how outputs are shown; default through IPython.
        open_panel: makes the widgets; default: those of ``widget_panel.py``.
        clock: seconds on a clock that never jumps.
    """

    def __init__(
        self,
        *,
        background: bool = False,
        publish: Publish | None = None,
        open_panel: Callable[[LogBook], LivePanel] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._is_background = background
        self._output = Output(publish)
        self._open_panel = open_panel or _open_panel
        self._pace = Pace(
            first_s=0.0 if background else 0.25, interval_s=INTERVAL_S, slow_s=INTERVAL_S, clock=clock
        )
        self._view = JobView()
        self._book = LogBook()
        self._panel: LivePanel | None = None
        self._is_plain = False
        self._is_closed = False
        if background:
            self._show(self._view)

    def on_event(self, event: Event) -> None:
        if isinstance(event, JobStarted) and not self._view.is_started:
            self._pace.restart()
        self._view = fold(self._view, event)
        self._book.add(event)

    def on_samples(self, samples: Sequence[Sample]) -> None:
        if self._is_closed or not self._view.is_started:
            return
        self._view = fold_samples(self._view, samples, self._view.started_s + self._pace.elapsed_s)
        # Once the job is over, close() is near and publishes the final table.
        if not self._view.is_over and self._pace.is_due():
            self._show(self._view)

    def control(self, controls: Controls) -> None:
        if self._is_background and self._panel is not None:
            self._panel.connect(controls)

    def show_again(self) -> bool:
        return self._output.show_again()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        lasting = mimebundle(broken_off(self._view), with_output=self._is_background)
        if self._view.is_started or self._output.shown is not None:
            self._output.show(lasting, even_if_same=True)
        # Only now: the output is replaced before its widgets vanish.
        if self._panel is not None:
            self._panel.close(lasting["text/html"])

    def _show(self, view: JobView) -> None:
        self._pace.mark()
        if not self._is_plain:
            try:
                self._show_panel(view)
            except Exception as error:
                self._give_up(error)
        if self._is_plain:
            self._output.show(mimebundle(view, with_output=self._is_background))

    def _show_panel(self, view: JobView) -> None:
        if self._panel is None:
            self._panel = self._open_panel(self._book)
            self._panel.show(view)
            self._output.show(self._panel.bundle(view))
        else:
            self._panel.show(view)

    def _give_up(self, error: Exception) -> None:
        """Widgets don't work here: from now on the job is shown as HTML, in the same output."""
        self._is_plain = True
        if isinstance(error, ImportError):
            _log.warning("the job is shown as HTML, without widgets: %s (pip install ipywidgets)", error)
        else:
            _log.warning("ipywidgets failed; the job is shown as HTML instead", exc_info=True)


def _open_panel(book: LogBook) -> LivePanel:
    from nblaunch.dashboard.widget_panel import Panel

    return Panel(book)
