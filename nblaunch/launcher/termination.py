"""What SIGTERM means to a launcher: a batch system takes the machine away soon, so let training end well while it can.

SIGTERM ──> ranks that handle SIGTERM themselves get it
        ──> ``accelerator.should_stop`` turns true, at the same step on every rank
        ──> when the grace is over, or soon where no rank handles it: an interrupt, which escalates
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress

from nblaunch.host import proc
from nblaunch.launcher.requests import JobRequests
from nblaunch.wire.board import Slot

LISTEN_S = 2.0
"""How long ranks that never looked at ``should_stop`` have for a first look: a few steps of most loops."""


class Termination:
    """One way to an orderly end. ``poll`` it until the workers have ended.

    Args:
        requests: of the job; gets the stop, and later the interrupt.
        now_s: ``time.monotonic()``.
        grace_s: seconds in which ranks may write a checkpoint and return by themselves.
        pids: rank -> process of the ranks whose function runs.
        slots: rank -> its slot of the board.
    """

    def __init__(
        self,
        requests: JobRequests,
        now_s: float,
        grace_s: float,
        pids: Mapping[int, int],
        slots: Mapping[int, Slot],
    ) -> None:
        self._requests = requests
        self._began_s = now_s
        self._grace_s = grace_s
        self._slots = [slots[rank] for rank in pids]
        self._is_over = False
        self._handling = [pid for pid in pids.values() if proc.catches(pid, signal.SIGTERM)]
        for pid in self._handling:
            # Not its group: the processes of its data loaders have no handler.
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        requests.stop()

    def poll(self, now_s: float) -> str:
        """Interrupt the ranks when their time is over; return the note about it once, else an empty text."""
        is_handled = bool(self._handling) or any(slot.num_checks > 0 for slot in self._slots)
        patience_s = self._grace_s if is_handled else min(self._grace_s, LISTEN_S)
        if self._is_over or now_s - self._began_s < patience_s:
            return ""
        self._is_over = True
        self._requests.interrupt()
        if is_handled:
            return f"the {self._grace_s:g} s after SIGTERM are over; ranks are interrupted"
        return "no rank looks at accelerator.should_stop or handles SIGTERM, so ranks are interrupted"
