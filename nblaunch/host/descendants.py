"""Every process that comes from the workers of a job, also where it has left their process groups.

    launcher   draws a tag
    worker     sets it ── fork, exec, setsid, an environment of its own, its parent's death: every descendant keeps it
    launcher   at the end: SIGKILL to each process with the tag

The system has no name for "all that a process has started". But descendants always keep their resource limits, which
``/proc`` shows. The tag is such a limit, and too high to limit anything: RLIMIT_RTTIME is processor time under
real-time scheduling, in microseconds (source: getrlimit(2)), and the lowest tag is 146,000 years.

Where a system has no such limit (macOS) or refuses it (gVisor), nothing has a tag, and nothing is ended by it.
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
"""Until then, no system has given out all its process ids, to begin again with the lowest."""


def carry(tag: int) -> None:
    """Give this process, and all that will descend from it, a tag; does nothing if the system does not allow it."""
    if _LIMIT is None:
        return
    soft, hard = resource.getrlimit(_LIMIT)
    # No limit, or the tag of a job around this one.
    if soft == resource.RLIM_INFINITY or soft >= _LOWEST_TAG:
        with suppress(OSError, ValueError):
            resource.setrlimit(_LIMIT, (tag, hard))


class Descendants:
    """The processes with one tag. Make it before the first of them starts."""

    def __init__(self) -> None:
        self.tag = _LOWEST_TAG + secrets.randbits(_TAG_BITS)
        self._digits = str(self.tag).encode()
        self._newest_before = _newest_pid()
        self._began_s = time.monotonic()

    def end(self, groups: Collection[int]) -> list[str]:
        """Kill them all; returns what was found running, as ``tensorboard (pid 123)``.

        Args:
            groups: process groups that were killed before. Their processes are not returned: they may be about to end.
        """
        found: list[str] = []
        killed: set[int] = set()
        for _ in range(_MAX_ROUNDS):  # what is killed may have started another
            new = [pid for pid in self._candidates() if pid not in killed and self._is_tagged(pid)]
            if not new:
                break
            for pid in new:
                found += self._kill(pid, groups)
            killed.update(new)
        return found

    def _candidates(self) -> list[int]:
        """Return process ids to look at; for a short job, only ids given since its start, as the system counts up."""
        given = self._given()
        # A list of all processes takes much longer. (It has no threads, whose ids may have a tag here.)
        if given is not None and len(given) <= _FEW and not any(map(self._is_tagged, given)):
            return []
        try:
            pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        except OSError:  # no such folder on this system
            return []
        given = self._given()  # after the list, or one in it could be newer
        return pids if given is None else [pid for pid in pids if pid in given]

    def _given(self) -> range | None:
        """Return the ids that processes and threads got since the start; None if that is not known for certain."""
        newest = _newest_pid()
        if time.monotonic() - self._began_s >= _SHORT_S or newest < self._newest_before:
            return None
        return range(self._newest_before + 1, newest + 1)

    def _is_tagged(self, pid: int) -> bool:
        return self._digits in proc.read_bytes(f"/proc/{pid}/limits")

    def _kill(self, pid: int, groups: Collection[int]) -> list[str]:
        """Kill one, unless it has ended by itself and another has its number; return its name if it was running."""
        fd = _hold(pid)
        try:
            name, _, rest = proc.read_bytes(f"/proc/{pid}/stat").decode(errors="replace").rpartition(")")
            state, _, group, *_ = rest.split() or ("X", "", "0")
            if state in "ZX" or not self._is_tagged(pid):
                return []
            if fd is None:
                os.kill(pid, signal.SIGKILL)
            else:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # it has ended, or runs as another user by now
            return []
        finally:
            if fd is not None:
                os.close(fd)
        return [] if int(group) in groups else [f"{name.partition('(')[2]} (pid {pid})"]


def _hold(pid: int) -> int | None:
    """Open a descriptor of this very process; None if the system has no such thing, or it has ended."""
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except OSError:
        return None


def _newest_pid() -> int:
    """Return the process id that was given last; 0 if it is not known. Source: proc_loadavg(5)."""
    return int((proc.read_bytes("/proc/loadavg").split() or [b"0"])[-1])
