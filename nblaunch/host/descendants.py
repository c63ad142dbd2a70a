"""Every process that a job's workers have started, directly or not, even if it has left their process groups.

    launcher   draws a tag
    worker     sets it ── every descendant keeps it: fork, exec, setsid, another environment, its parent's death
    launcher   at the end: SIGKILL to each process with the tag

The system has no name for "all processes that a process has started". But descendants always keep their resource
limits, and ``/proc`` shows them. The tag is such a limit, too high to limit anything: RLIMIT_RTTIME is processor time
under real-time scheduling, in microseconds (source: getrlimit(2)), and the lowest tag is 146,000 years.

If a system has no such limit (macOS) or rejects it (gVisor), no process gets a tag, and none is killed.
"""

from __future__ import annotations

import os
import resource
import secrets
import signal
import time
from collections.abc import Collection
from contextlib import suppress

from nblaunch.host import proc

_LOWEST_TAG = 1 << 62
_TAG_BITS = 61
_LIMIT: int | None = getattr(resource, "RLIMIT_RTTIME", None)
_MAX_ROUNDS = 20
_FEW = 100
_SHORT_S = 2.0
"""A time, in seconds, that is too short for any system to use up its process ids and start again with the lowest."""


def carry(tag: int) -> None:
    """Give this process and all its future descendants a tag; do nothing if the system does not allow it."""
    if _LIMIT is None:
        return
    soft, hard = resource.getrlimit(_LIMIT)
    # Nothing has set this limit, or an enclosing job has set it to that job's tag.
    if soft == resource.RLIM_INFINITY or soft >= _LOWEST_TAG:
        with suppress(OSError, ValueError):
            resource.setrlimit(_LIMIT, (tag, hard))


class Descendants:
    """The processes with one tag. Create this object before the first of them starts."""

    def __init__(self) -> None:
        self.tag = _LOWEST_TAG + secrets.randbits(_TAG_BITS)
        self._digits = str(self.tag).encode()
        self._newest_before = _newest_pid()
        self._began_s = time.monotonic()

    def end(self, groups: Collection[int]) -> list[str]:
        """Kill all of these processes; return those that were running, such as ``tensorboard (pid 123)``.

        Args:
            groups: process groups that have already been killed. Their processes are not returned: they may be ending.
        """
        running: list[str] = []
        killed: set[int] = set()
        for _ in range(_MAX_ROUNDS):  # a killed process may have started another
            new = [pid for pid in self._candidates() if pid not in killed and self._is_tagged(pid)]
            if not new:
                break
            for pid in new:
                running += self._kill(pid, groups)
            killed.update(new)
        return running

    def _candidates(self) -> list[int]:
        """Return process ids to check; for a short job, only ids since its start, because ids are assigned in order."""
        new_pids = self._new_pids()
        # Listing all processes takes much longer. (Unlike that list, the new ids include ids of threads, which may have
        # a tag.)
        if new_pids is not None and len(new_pids) <= _FEW and not any(map(self._is_tagged, new_pids)):
            return []
        pids = proc.all_pids()
        new_pids = self._new_pids()  # read after the list, so that no listed process is newer
        return pids if new_pids is None else [pid for pid in pids if pid in new_pids]

    def _new_pids(self) -> range | None:
        """Return the ids given to processes and threads since this object was created; None if they are uncertain."""
        newest = _newest_pid()
        if time.monotonic() - self._began_s >= _SHORT_S or newest < self._newest_before:
            return None
        return range(self._newest_before + 1, newest + 1)

    def _is_tagged(self, pid: int) -> bool:
        return self._digits in proc.read_bytes(f"/proc/{pid}/limits")

    def _kill(self, pid: int, groups: Collection[int]) -> list[str]:
        """Kill a process unless it has ended and another has its id; return its name if it was running."""
        fd = _hold(pid)
        try:
            process = proc.process(pid)
            if process is None or process.state in "ZX" or not self._is_tagged(pid):
                return []
            if fd is None:
                os.kill(pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # it has ended, or now runs as another user
            return []
        finally:
            if fd is not None:
                os.close(fd)
        return [] if process.group in groups else [f"{process.name} (pid {pid})"]


def _hold(pid: int) -> int | None:
    """Open a descriptor of exactly this process; None if the system does not support it, or the process has ended."""
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except OSError:
        return None


def _newest_pid() -> int:
    """Return the process id that the system assigned last; 0 if unknown. Source: proc_loadavg(5)."""
    return int((proc.read_bytes("/proc/loadavg").split() or [b"0"])[-1])
