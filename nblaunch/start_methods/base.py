"""How workers are watched: as a :class:`WorkerGroup`, which knows nothing but processes."""

from __future__ import annotations

from abc import ABC, abstractmethod

from nblaunch.events import ExitStatus

KILL_PATIENCE_S = 10.0
"""From SIGKILL until a process is given up. Tearing down some hundred GB, or a device, takes seconds."""


class WorkerGroup(ABC):
    """The processes of one attempt of a job. Each worker leads a POSIX session and process group of its own."""

    @abstractmethod
    def pids(self) -> dict[int, int]:
        """Return rank -> process id of the workers known by now. A worker's process group has the same number."""

    @abstractmethod
    def process_groups(self) -> list[int]:
        """Return every process group that must not outlive the launcher, helpers included.

        A leader that was reaped is left out: the system may give its number to another process.
        """

    @abstractmethod
    def waitables(self) -> list[int]:
        """Return descriptors that become readable when :meth:`poll` may have something. If empty, poll at times."""

    @abstractmethod
    def poll(self) -> list[tuple[int, ExitStatus]]:
        """Return ranks that have ended since the last call, and kill what is left of their groups. Never blocks."""

    @abstractmethod
    def signal(self, rank: int, signum: int) -> None:
        """Send a signal to the whole process group of a rank; nothing if it has ended."""

    @abstractmethod
    def abandon(self, rank: int) -> None:
        """Wait no longer for a rank that SIGKILL does not end; its group stays in :meth:`process_groups`."""

    @abstractmethod
    def close(self) -> None:
        """Kill what still runs, reap it and all helpers, release descriptors. Called once.

        Waits at most :data:`KILL_PATIENCE_S` for processes that were killed, and leaves those that still do not end.
        """
