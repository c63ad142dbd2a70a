"""Telling the progress board what pass over which data a worker is in.

Passes nest: a training loop that evaluates every hundred steps, ``progress(enumerate(loader))``. The board has one
row per rank, so only the innermost pass is shown, and the one around it comes back when it moves on.
"""

from __future__ import annotations

from nblaunch.events import WorkerState
from nblaunch.wire.board import Slot


class Pass:
    """One pass over a loader or an iterable. ``total`` is -1 where its length is not known."""

    __slots__ = ("epoch", "phase", "state", "step", "total")

    def __init__(self, total: int, epoch: int, state: WorkerState) -> None:
        self.total = total
        self.epoch = epoch
        self.state = state
        self.phase = state.name.lower()
        self.step = 0


class PassStack:
    """The passes of this process, outermost first; the last one writes to the slot.

    ``epoch`` is the number of completed passes over a training loader, shown with passes that train nothing, too.
    """

    def __init__(self, slot: Slot) -> None:
        self.epoch = 0
        self._slot = slot
        self._advance_to = slot.advance_to
        self._samples = 0
        self._stack: list[Pass] = []
        self._shown: Pass | None = None
        self._outside = WorkerState.RUNNING

    def begin(self, total: int, epoch: int, state: WorkerState, step: int = 0) -> Pass:
        """A pass begins inside those that run; ``step`` batches of it are behind us already."""
        if not self._stack:
            self._outside = self._slot.state
        begun = Pass(total, epoch, state)
        begun.step = step
        self._stack.append(begun)
        self._show(begun)
        return begun

    def advance(self, one: Pass, samples: int = 0) -> None:
        """``one`` hands out its next batch. Called at every step."""
        one.step = step = one.step + 1
        self._samples = total = self._samples + samples
        if self._shown is one:
            self._advance_to(step, total)
        elif self._stack and self._stack[-1] is one:
            self._show(one)

    def end(self, one: Pass) -> None:
        """``one`` is over or was abandoned."""
        if one in self._stack:
            self._stack.remove(one)
        if self._shown is one:
            self._shown = None
            # The finished bar stays on the board until something else moves; only what the worker does changes.
            self._slot.set_state(self._stack[-1].state if self._stack else self._outside)

    def _show(self, one: Pass) -> None:
        self._shown = one
        self._slot.start_pass(one.total, one.epoch, one.state, one.step)
