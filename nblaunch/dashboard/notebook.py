"""A job in a notebook: one output, updated in place through its display id.

Owns when the table is published. What is published is complete in itself (HTML and text), so that the last update is
also what a saved notebook keeps, with no widget state. Never prints: lines are the business of ``lines.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import final

from nblaunch.dashboard.base import Pace
from nblaunch.dashboard.html import mimebundle
from nblaunch.dashboard.output import Bundle, Output, Publish
from nblaunch.dashboard.text import render_text
from nblaunch.dashboard.view import JobView
from nblaunch.dashboard.viewing import ViewingDashboard


@final
class NotebookDashboard(ViewingDashboard):
    """The table of a job, shown through one display id.

    Args:
        background: the cell returns while the job runs. The output is then created here, in the thread of the cell,
            and shows the last lines of all ranks: prints from another thread would land in another cell.
        is_html: publish HTML and text; text alone if False.
        publish: how; default through IPython.
        clock: seconds on a clock that never jumps.
    """

    def __init__(
        self,
        *,
        background: bool = False,
        is_html: bool = True,
        publish: Publish | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        # A short job publishes its final table only.
        super().__init__(Pace(first_s=0.0 if background else 0.25, clock=clock))
        self._is_background = background
        self._is_html = is_html
        self._output = Output(publish)
        self._looked_at: tuple[JobView, int] | None = None
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
        """Whether rendering is worth while: something was told, or the clock shows another second."""
        second = int(self._view.elapsed_s)
        last, self._looked_at = self._looked_at, (self._view, second)
        if last is None or last[1] != second or last[0].ranks is not self._view.ranks:
            return True
        return last[0].notes is not self._view.notes or last[0].tail is not self._view.tail

    def _show(self, view: JobView, *, is_final: bool = False) -> None:
        with_output = self._is_background
        if self._is_html:
            bundle: Bundle = mimebundle(view, with_output=with_output)
        else:
            bundle = {"text/plain": render_text(view, with_output=with_output)}
        if self._output.show(bundle, even_if_same=is_final):
            self._pace.mark(sum(map(len, bundle.values())))
