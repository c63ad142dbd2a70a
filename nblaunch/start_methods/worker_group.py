"""Manages workers as a group: waits for them, signals them, and leaves none of their child processes behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from nblaunch.events import UNKNOWN_EXIT, ExitStatus
from nblaunch.host import descriptors

_REAP_INTERVAL_S = 0.002

KILL_PATIENCE_S = 10.0
"""Seconds to wait for a process after SIGKILL: tearing down hundreds of GB of memory, or a device, takes seconds."""


class WorkerGroup(ABC):
    """The processes of one attempt of a job. Each worker leads its own POSIX session and process group."""

    @abstractmethod
    def pids(self) -> dict[int, int]:
        """Return the process ids, by rank, of the workers known so far. A worker's process group has the same id."""

    @abstractmethod
    def process_groups(self) -> list[int]:
        """Return every process group that must not outlive the launcher, including helpers' groups.

        Groups whose leader was reaped are left out, because the system may give the leader's id to another process.
        """

    @abstractmethod
    def waitables(self) -> list[int]:
        """Return descriptors that become readable when :meth:`poll` may return ranks.

        If there are none, :meth:`poll` must be called at intervals.
        """

    @abstractmethod
    def poll(self) -> list[tuple[int, ExitStatus]]:
        """Return ranks that have ended since the last call, and kill the rest of their groups. Never blocks."""

    @abstractmethod
    def signal(self, rank: int, signum: int) -> None:
        """Send a signal to the whole process group of a rank; do nothing if it has ended."""

    @abstractmethod
    def abandon(self, rank: int) -> None:
        """Stop waiting for a rank that SIGKILL does not end; its group stays in :meth:`process_groups`."""

    @abstractmethod
    def close(self) -> None:
        """Kill the processes that are still running, reap them and all helpers, and release descriptors. Called once.

        Wait at most :data:`KILL_PATIENCE_S` for killed processes, and leave those that have not ended by then.
        """


class Children(WorkerGroup):
    """A group of child processes, each the leader of its own process group."""

    def __init__(self, pids: Mapping[int, int]) -> None:
        self._pids = dict(pids)
        self._alive = dict(pids)
        self._abandoned: list[int] = []
        self._pidfds = {rank: fd for rank, pid in pids.items() if (fd := open_pidfd(pid)) is not None}

    def pids(self) -> dict[int, int]:
        return dict(self._pids)

    def process_groups(self) -> list[int]:
        return [*self._alive.values(), *self._abandoned]

    def waitables(self) -> list[int]:
        return list(self._pidfds.values())

    def poll(self) -> list[tuple[int, ExitStatus]]:
        ended = []
        for rank, pid in list(self._alive.items()):
            status = reap_with_group(pid)
            if status is not None:
                del self._alive[rank]
                ended.append((rank, status))
                self._close_pidfd(rank)
        return ended

    def signal(self, rank: int, signum: int) -> None:
        if rank in self._alive:
            signal_group(self._alive[rank], signum)

    def abandon(self, rank: int) -> None:
        # Don't reap the process: until this process collects the status, no other process gets the id.
        self._abandoned.append(self._alive.pop(rank))
        self._close_pidfd(rank)

    def close(self) -> None:
        kill_and_reap(self._alive.values())
        self._alive = {}
        descriptors.close(*self._pidfds.values())
        self._pidfds = {}

    def _close_pidfd(self, rank: int) -> None:
        if rank in self._pidfds:
            descriptors.close(self._pidfds.pop(rank))


def open_pidfd(pid: int) -> int | None:
    """Open a descriptor that becomes readable when a process ends; return None if the system does not support this."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    descriptors.keep_from_children(fd)
    return fd


def signal_group(pid: int, signum: int) -> None:
    """Send a signal to the process group that ``pid`` leads, or only to ``pid`` if its group does not exist yet."""
    for send in (os.killpg, os.kill):
        try:
            send(pid, signum)
        except (ProcessLookupError, PermissionError):  # macOS returns EPERM for a group of zombies
            continue
        return


def kill_and_reap(pids: Iterable[int]) -> set[int]:
    """Send SIGKILL to each child's group and wait for the children to end; return those that have not ended in time."""
    waiting = set(pids)
    for pid in waiting:
        signal_group(pid, signal.SIGKILL)
    deadline = time.monotonic() + KILL_PATIENCE_S
    while waiting := {pid for pid in waiting if reap_with_group(pid) is None}:
        if time.monotonic() > deadline:
            break
        time.sleep(_REAP_INTERVAL_S)
    return waiting


def reap_with_group(pid: int) -> ExitStatus | None:
    """If child ``pid`` has ended, kill the rest of its group, then reap the child; return how it ended.

    Leftovers are killed while the child is a zombie, because no other process can get its id until it is reaped.
    """
    try:
        if hasattr(os, "waitid"):
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
            _kill_leftovers(pid)
        ended, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return UNKNOWN_EXIT
    if ended == 0:
        return None
    if not hasattr(os, "waitid"):
        _kill_leftovers(pid)
    return ExitStatus(os.waitstatus_to_exitcode(status))


def _kill_leftovers(pid: int) -> None:
    try:
        os.killpg(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def disown(process: subprocess.Popen[bytes]) -> int:
    """Stop ``subprocess`` from waiting for a process: it would warn about the process and reap it unnoticed."""
    process.returncode = 0
    return process.pid


# --- exit statuses if SIGCHLD is ignored ------------------------------------------------------------------------------

# If SIGCHLD is ignored, the system forgets how a child has ended (wait(2), "Notes"). A kernel may ignore it because a
# cell or the program that started the kernel did so. While workers run, the signal's disposition is therefore the
# system's default, which also ignores it but keeps exit statuses.
#
# The disposition is set in C for two reasons: any thread may do so, and ``signal.getsignal`` still returns the user's
# choice, which applies again afterwards.

_set_disposition = ctypes.CDLL(None).signal
_set_disposition.argtypes = (ctypes.c_int, ctypes.c_void_p)
_set_disposition.restype = ctypes.c_void_p

_lock = threading.Lock()
_num_blocks = 0


@contextmanager
def exit_statuses_kept() -> Iterator[None]:
    """Make the system keep children's exit statuses during the block. Blocks in several threads may overlap."""
    global _num_blocks
    with _lock:
        _num_blocks += 1
        _change_disposition(signal.SIG_DFL)
    try:
        yield
    finally:
        with _lock:
            _num_blocks -= 1
            if not _num_blocks:
                _change_disposition(signal.SIG_IGN)


def _change_disposition(disposition: signal.Handlers) -> None:
    """Set the disposition of SIGCHLD, but only while the user has chosen to ignore the signal."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        _set_disposition(signal.SIGCHLD, int(disposition))
