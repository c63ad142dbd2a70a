"""The memory of its device that a rank has taken, on the dashboard."""

from __future__ import annotations

from time import monotonic

from nblaunch.backends.base import Backend
from nblaunch.wire.board import Slot

_INTERVAL_S = 1.0


class DeviceMemoryReport:
    """Shows it on the board, at most once a second.

    Args:
        slot: where.
        backend: whom to ask.
    """

    def __init__(self, slot: Slot, backend: Backend) -> None:
        self._slot = slot
        self._backend = backend
        self._next_s = 0.0

    def show_due(self) -> None:
        """Show what is taken now, unless that was done a moment ago."""
        now_s = monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + _INTERVAL_S
        memory = self._backend.own_memory()
        if memory is not None:
            self._slot.set_device_memory(*memory)
