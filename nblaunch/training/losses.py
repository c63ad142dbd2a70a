"""The loss on the dashboard: sampled while training runs, exact when a pass ends."""

from __future__ import annotations

import time

import torch

from nblaunch.training.device_memory import DeviceMemoryReport
from nblaunch.wire.board import Slot

_INTERVAL_S = 0.5


class LossReport:
    """Shows the loss of a process on its slot of the board, at most twice a second.

    Reading a value makes the process wait for the device, so most losses are only kept, and the last one of a pass is
    read when the pass ends.

    Args:
        slot: where it is shown.
        memory: what else is due from time to time.
    """

    def __init__(self, slot: Slot, memory: DeviceMemoryReport | None = None) -> None:
        self._slot = slot
        self._memory = memory
        self._next_s = 0.0
        self._unread: torch.Tensor | None = None

    def note(self, loss: torch.Tensor, is_there: bool = True) -> None:
        """``loss`` is the latest one. Called at every micro-step; anything but a single number is left out.

        Args:
            loss: a tensor of one element.
            is_there: False where it has no value before the step ends: then :meth:`show_due` shows it.
        """
        if loss.numel() != 1:
            return
        self._unread = loss.detach()  # the graph behind it goes as soon as the caller drops it
        if is_there:
            self.show_due()

    def show_due(self) -> None:
        """Show the latest loss, unless one was shown a moment ago."""
        now = time.monotonic()
        if now >= self._next_s:
            self._next_s = now + _INTERVAL_S
            self.flush()

    def flush(self) -> None:
        """Show the latest loss now."""
        if self._memory is not None:
            self._memory.show_due()
        unread, self._unread = self._unread, None
        if unread is None:
            return
        try:
            value = float(unread.cpu())  # on a lazy device, a number read directly is another graph
        except RuntimeError:
            return  # the device failed; the error that the user sees is the one of their own call
        self._slot.set_loss(value)
