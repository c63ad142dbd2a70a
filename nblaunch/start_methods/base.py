"""How workers come to be: a :class:`StartMethod` starts them and gives a :class:`WorkerGroup` to watch them by.

A start method knows nothing of events, logs or results; a group knows nothing but processes. Each method is one
file of this folder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from nblaunch.events import ExitStatus
from nblaunch.start_methods.saved_call import SavedCall
from nblaunch.wire.assignment import Assignment, FunctionCall
from nblaunch.wire.board import Board

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


class StartMethod(ABC):
    """One way to start workers."""

    name: str

    @abstractmethod
    def start(
        self,
        call: FunctionCall,
        assignments: Sequence[Assignment],
        board: Board,
        saved: SavedCall | None = None,
    ) -> WorkerGroup:
        """Start one worker per assignment.

        Args:
            call: the function and its arguments.
            assignments: one per worker.
            board: their progress.
            saved: the call as it was earlier, which fresh processes load in place of ``call``; None = save it now.

        Raises:
            PayloadError: the call can't be sent to workers; names the variable.
            LaunchError: the system refused a process; those already started are gone again.
        """
