"""Lets a worker see whether programs that the kernel started with ``subprocess`` are still running.

Only the parent of a process can wait for it. If a wait fails, ``subprocess`` assumes that the process ended with
status 0. In a forked worker, a server that the kernel started would then always seem to have ended, and ``kill()``
would do nothing. A worker therefore asks the system for the state of the programs that the kernel started.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from nblaunch import packages
from nblaunch.host import exhaustion

_POLL_S = 0.05
_STATE, _EXIT_STATUS = 0, 49
"""Indices of fields after the command's name. Source: proc_pid_stat(5), state and exit_code."""

_ENDED = ("Z", "X")


_is_watched = False
_has_children = False
"""Whether the process that forked this worker had children, which may be programs."""


def remember() -> None:
    """Note whether this process, which is about to fork, has children."""
    global _has_children
    if sys.platform == "darwin":  # this system has no waitid()
        _has_children = True
        return
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        _has_children = True
    except ChildProcessError:
        _has_children = False


def watch(*, is_forked_here: bool = False) -> None:
    """Make ``subprocess`` in this process report the true state of the programs that the kernel started.

    Args:
        is_forked_here: whether this process was forked from a worker, which may have started programs itself.
    """
    global _is_watched
    if _is_watched or not (_has_children or is_forked_here):
        return
    _is_watched = True
    cls: Any = subprocess.Popen
    poll, try_wait = cls._internal_poll, cls._try_wait

    @packages.replacement_of(poll)
    def poll_here(self: Any, *args: Any, **kwargs: Any) -> int | None:
        if self.returncode is not None or packages.is_own(self):
            result: int | None = poll(self, *args, **kwargs)
            return result
        status = _status(self.pid)
        if status is not None:
            self._handle_exitstatus(status)
        return None if status is None else self.returncode

    @packages.replacement_of(try_wait)
    def try_wait_here(self: Any, wait_flags: int) -> tuple[int, int]:
        if packages.is_own(self):
            result: tuple[int, int] = try_wait(self, wait_flags)
            return result
        while (status := _status(self.pid)) is None:
            if wait_flags & os.WNOHANG:
                return 0, 0
            time.sleep(_POLL_S)
        return self.pid, status

    packages.call_before(cls, "__init__", packages.mark_as_own)
    cls._internal_poll, cls._try_wait = poll_here, try_wait_here


def _status(pid: int) -> int | None:
    """Return the wait status of a process that has ended (0 if only its parent knows it); None while it runs."""
    try:
        os.kill(pid, 0)
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except PermissionError:  # the process belongs to another user
        return None
    except ProcessLookupError:
        return 0
    except OSError as error:
        # The process has just ended, unless its file can't be opened or there is no /proc.
        is_unknown = exhaustion.is_exhausted(error) or not os.path.isdir("/proc/self")
        return None if is_unknown else 0
    return int(fields[_EXIT_STATUS]) if fields[_STATE] in _ENDED else None
