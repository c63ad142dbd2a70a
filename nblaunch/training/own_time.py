"""How long a rank computes by itself in each step: what tells the slow rank where all ranks go in step.

    batch ──> forward ──> backward (ranks wait for each other) ──> optimizer ──> next batch ──> forward ──> backward
                                                              └────────── own time ──────────┘

Where gradients are averaged, all ranks make the same number of steps a second, that of the slowest one. It is the rank
whose own time is the longest. On devices that compute while Python runs ahead, that is the time Python takes: slow
loading and slow hosts are seen, a slow device is not.
"""

from __future__ import annotations

from time import monotonic

from nblaunch.wire.board import Slot


class OwnTime:
    """Measures it and adds it up on the board.

    Args:
        slot: where it is shown.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._since = 0.0

    def begin_backward(self) -> None:
        """From here on the rank may wait for others."""
        if self._since:
            self._slot.add_own_time(monotonic() - self._since)

    def end_backward(self) -> None:
        """From here on the rank is by itself."""
        self._since = monotonic()

    def pause(self) -> None:
        """What follows is no part of a step: a pass has ended."""
        self._since = 0.0
