"""Buttons of a job that runs in the background: where its ranks are, stop it, kill it.

A click may arrive in any thread of the kernel (the main one, a subshell's), and late: only when no cell runs, on most
kernels. So while one runs, nothing can be clicked, and a tooltip says why. A click asks the job, which wakes its own
thread, and notes what was asked; the panel draws that at its next tick.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from time import monotonic
from typing import Any

import ipywidgets as widgets
from IPython import get_ipython

from nblaunch.dashboard.base import Controls
from nblaunch.dashboard.cell_watch import CellWatch
from nblaunch.dashboard.widget_valve import Valve

_SURE_S = 5.0
STOP_ASKED = (
    "asked to stop: loops that look at accelerator.should_stop end at the same step on every rank. "
    "Interrupt ends any other function, too"
)
INTERRUPT_ASKED = "interrupted: finally blocks run, then the workers end"
KILL_ASKED = "killed"
BUSY = "a cell is running, and clicks reach the kernel only when it has ended"


class Buttons:
    """Stacks, Stop and Kill.

    Args:
        valve: through which they change.
        clock: seconds on a clock that never jumps.
    """

    def __init__(self, valve: Valve, clock: Callable[[], float] = monotonic) -> None:
        self._valve = valve
        self._clock = clock
        self._controls: Controls | None = None
        self._cells = CellWatch(None)
        self._tooltips: dict[Any, str] = {}
        self._has_asked_to_stop = False
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
        """Draw what was clicked; sent at the valve's next flush."""
        layout = self._shown if is_running and self._controls is not None else self._hidden
        is_sure = self._clock() - self._kill_clicked_s < _SURE_S
        stop = "Interrupt" if self._has_asked_to_stop else "Stop"
        kill = "Kill: sure?" if is_sure else "Kill"
        style = "danger" if is_sure else ""
        for button, tooltip in self._tooltips.items():
            is_busy = self._cells.is_busy
            self._valve.want(button, disabled=is_busy, tooltip=BUSY if is_busy else tooltip, is_urgent=True)
        self._valve.want(self._stacks, layout=layout, is_urgent=True)
        self._valve.want(self._stop, layout=layout, description=stop, is_urgent=True)
        self._valve.want(self._kill, layout=layout, description=kill, button_style=style, is_urgent=True)

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
        if self._has_asked_to_stop:
            self.message = INTERRUPT_ASKED
            self._controls.interrupt()
        else:
            self._has_asked_to_stop, self.message = True, STOP_ASKED
            self._controls.stop()

    def _on_kill(self, button: Any) -> None:
        """The first click asks whether that is meant: what was trained since the last checkpoint is lost."""
        if self._controls is None:
            return
        if self._clock() - self._kill_clicked_s < _SURE_S:
            self.message = KILL_ASKED
            self._controls.cancel()
        self._kill_clicked_s = self._clock()
