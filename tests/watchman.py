"""Ends the processes of the tests when the test process is gone, even after SIGKILL or os._exit.

    this process ──────── starts ────────> servers, kernels, programs: all inherit a token in their environment
         │                                     ^
         └── watchman.begin() ──> watchman ────┘ once this process has ended: SIGKILL to whatever carries the token

Fixtures end their own processes; the watchman acts if the test process can't run them. Otherwise a server in a separate
POSIX session, such as JupyterLab here, would run forever. Linux only, because it reads ``/proc``. It does not find
forked processes that have executed no program, because they have no environment of their own.
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import sys
import time
from pathlib import Path

VARIABLE = "NBLAUNCH_TESTS_TOKEN"
_LIMIT_S = 10.0


def begin() -> None:
    """Watch this process from now on. Later calls do nothing."""
    if sys.platform != "linux" or os.environ.get(VARIABLE, "").startswith(f"{os.getpid()}-"):
        return
    token = f"{os.getpid()}-{secrets.token_hex(8)}"
    # Not with subprocess: no process waits for the watchman, and it must not keep open the pipes that others read to
    # the end.
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), token],
        # Remove a token that this process may have inherited: an outer watchman then ends this process but not this
        # watchman, which ends this process's children.
        {name: value for name, value in os.environ.items() if name != VARIABLE},
        file_actions=[(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)],
    )
    os.environ[VARIABLE] = token


def _watch(pid: int, token: str) -> None:
    os.setsid()  # a signal to the tests' process group must not reach the watchman
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        pass  # it has ended already
    else:
        if os.getppid() == pid:  # and the number does not belong to another process
            select.select([watched], [], [])  # readable once it has ended (source: man 2 pidfd_open)
    # Repeat it, because a process that is about to be killed may be starting another one.
    deadline = time.monotonic() + _LIMIT_S
    while (carriers := _carriers(token)) and time.monotonic() < deadline:
        for carrier in carriers:
            _kill(carrier)


def _carriers(token: str) -> list[int]:
    """Return the running processes with this token in their environment; zombies have no environment."""
    entry = f"{VARIABLE}={token}".encode()
    return [
        int(folder.name)
        for folder in Path("/proc").iterdir()
        if folder.name.isdigit() and entry in _environment(folder).split(b"\0")
    ]


def _environment(folder: Path) -> bytes:
    try:
        return (folder / "environ").read_bytes()
    except OSError:
        return b""  # it has ended in the meantime, or belongs to another user


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2])
