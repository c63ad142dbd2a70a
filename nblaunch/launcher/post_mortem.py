"""Failures that are kept for the debugger, until they are released.

a rank raises ──> the job has failed, its error is raised, its workers stay ── inspect, compare, pdb
                  the next launch, release(), 30 minutes, or the end of this process ──> they end

The workers of a job are kept by ``runner.py``, a command of a session that has failed by ``session/client.py``.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from abc import ABC, abstractmethod

from nblaunch.launcher.debug_client import DebugClient


class KeptFailure(ABC):
    """A failure that the debugger can look into.

    Args:
        debugger: client of the debugger in the workers.
        failed_rank: with the root cause.
    """

    def __init__(self, debugger: DebugClient, failed_rank: int) -> None:
        self.failed_rank = failed_rank
        self._debugger = debugger
        self._lock = threading.Lock()
        self._released = threading.Event()
        _all[next(_numbers)] = self

    @property
    def is_released(self) -> bool:
        """Whether nothing is kept any more."""
        return self._released.is_set()

    def find_debugger(self, rank: int | None = None) -> tuple[DebugClient, int]:
        """Return the client of the debugger, and the rank to be debugged: None = the one that failed.

        Raises:
            ValueError: there is no such rank.
        """
        return self._debugger, self._debugger.checked_rank(rank, self.failed_rank)

    def wait(self) -> None:
        """Wait until it is released."""
        self._released.wait()

    def release(self) -> None:
        """Give up what is kept."""
        with self._lock:
            if not self.is_released:
                try:
                    self._release()
                finally:
                    self._released.set()

    @abstractmethod
    def _release(self) -> None:
        """Do what :meth:`release` does, once."""


_all: weakref.WeakValueDictionary[int, KeptFailure] = weakref.WeakValueDictionary()
"""In the order in which they came."""

_numbers = itertools.count()


def latest() -> KeptFailure | None:
    """Return what was kept last and has not been released."""
    kept = [one for one in list(_all.values()) if not one.is_released]
    return kept[-1] if kept else None


def release_kept_failures() -> None:
    """Give up what jobs and sessions of this process keep, since workers are about to start."""
    for kept in list(_all.values()):
        kept.release()
