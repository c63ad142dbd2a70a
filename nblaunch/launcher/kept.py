"""Workers that are kept where they were when one of them failed, for the debugger, until they are released.

a rank raises ──> the job has failed, its error is raised, its workers stay ── inspect, compare, pdb
                  the next launch, release(), 30 minutes, or the end of this process ──> they end
"""

from __future__ import annotations

import threading

from nblaunch.launcher.debug_channel import DebugChannel
from nblaunch.launcher.supervisor import Supervisor

KEPT_S = 1800.0
"""How long workers are kept at most."""


class KeptWorkers:
    """The workers of a failed job.

    Args:
        supervisor: has watched them so far.
        channel: to the debugger in each of them.
        failed_rank: with the root cause.
    """

    def __init__(self, supervisor: Supervisor, channel: DebugChannel, failed_rank: int) -> None:
        self.failed_rank = failed_rank
        self._channel = channel
        self._supervisor = supervisor
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._timer = threading.Timer(KEPT_S, self.release)
        self._timer.daemon = True
        self._timer.start()
        _all.append(self)

    @property
    def is_released(self) -> bool:
        """Whether the workers have been ended."""
        return self._released.is_set()

    def wait(self) -> None:
        """Wait until they are released."""
        self._released.wait()

    def release(self) -> None:
        """End the workers as after any failure: the failed ones run their exit handlers, the others are stopped."""
        with self._lock:
            if self.is_released:
                return
            _all.remove(self)
            self._timer.cancel()
            self._channel.release()
            try:
                self._supervisor.end_kept()
            finally:
                self._released.set()


_all: list[KeptWorkers] = []


def release_all() -> None:
    """End the workers that jobs of this process keep."""
    for kept in list(_all):
        kept.release()
