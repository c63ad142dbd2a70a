"""Whether a cell runs in this kernel, by the events of its shell.

While one does, what a person clicks does not reach the kernel on most versions: it arrives when the cell has ended.
Knows no widgets.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

SHORT_S = 0.5
"""Cells that end within this time are as good as none: a click waits for them and nobody notices."""


class CellWatch:
    """Follows the cells of a shell from the cell that runs now on, until it is closed.

    Args:
        shell: of IPython, in the thread of its cells; None where there is none: then no cell ever runs.
        clock: seconds on a clock that never jumps.
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
        """Whether a cell runs, for longer than a moment."""
        since_s = self._since_s
        return since_s is not None and self._clock() - since_s >= SHORT_S

    def close(self) -> None:
        """Follow no longer. Calls after the first do nothing."""
        events, self._events, self._since_s = self._events, None, None
        if events is not None:
            for name, hook in self._hooks:
                events.unregister(name, hook)

    def _on_begin(self, *info: Any) -> None:
        self._since_s = self._clock()

    def _on_end(self, *result: Any) -> None:
        self._since_s = None
