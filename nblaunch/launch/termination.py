"""What SIGTERM means to a launcher: a batch system takes the machine away soon, so let training end well while it can.

SIGTERM ──> ranks that handle SIGTERM themselves get it
        ──> ``accelerator.should_stop`` turns true, at the same step on every rank
        ──> when the grace is over, or at once where nobody listens: an interrupt, with its own way down
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress

from nblaunch.launch.diagnosis import processes
from nblaunch.launch.requests import StopRequests
from nblaunch.wire.board import Slot


class Termination:
    """One way to an orderly end. ``poll`` it until the workers have ended.

    Args:
        requests: of the job; gets the stop, and later the interrupt.
        now_s: ``time.monotonic()``.
        grace_s: seconds in which ranks may write a checkpoint and leave by themselves.
        pids: rank -> process of the ranks whose function runs.
        slots: rank -> its slot of the board.
    """

    def __init__(
        self,
        requests: StopRequests,
        now_s: float,
        grace_s: float,
        pids: Mapping[int, int],
        slots: Mapping[int, Slot],
    ) -> None:
        self._requests = requests
        self._is_interrupted = False
        handling = {rank: pid for rank, pid in pids.items() if processes.catches(pid, signal.SIGTERM)}
        for pid in handling.values():
            with suppress(ProcessLookupError):
                os.kill(
                    pid, signal.SIGTERM
                )  # not its group: the processes of its data loaders have no handler
        # Who never looked at should_stop so far will hardly begin to.
        self.is_heard = bool(handling) or any(slots[rank].num_checks > 0 for rank in pids)
        self._until_s = now_s + (grace_s if self.is_heard else 0.0)
        requests.stop()

    def poll(self, now_s: float) -> None:
        """Interrupt the ranks when their time is over."""
        if not self._is_interrupted and now_s >= self._until_s:
            self._is_interrupted = True
            self._requests.interrupt()
