"""Ends what the tests have started when their own process is gone, however it went: by SIGKILL, say, or by os._exit.

    this process ──────── starts ────────> servers, kernels, programs: all inherit a token in their environment
         │                                     ^
         └── watchman.begin() ──> watchman ────┘ once this process has ended: SIGKILL to whatever carries the token

Fixtures end what they started; this is for a process that has no time for them. A server in a POSIX session of its
own, as JupyterLab is one here, would run for ever. Linux only: it reads ``/proc``. A process that was forked from this
one, and executed no program since, is not found: it carries no environment of its own.
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
    """Have this process watched from now on. Calls after the first do nothing."""
    if sys.platform != "linux" or os.environ.get(VARIABLE, "").startswith(f"{os.getpid()}-"):
        return
    token = f"{os.getpid()}-{secrets.token_hex(8)}"
    # Not with subprocess: no process ever waits for it, and it is to hold no output open that another reads to its end.
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), token],
        # Without a token that this process may have inherited: a process that looks for that one is to end this
        # process, and this watchman then what it started.
        {name: value for name, value in os.environ.items() if name != VARIABLE},
        file_actions=[(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)],
    )
    os.environ[VARIABLE] = token


def _watch(pid: int, token: str) -> None:
    os.setsid()  # a signal to the group of the tests is not for this process
    try:
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        pass  # it has ended already
    else:
        if os.getppid() == pid:  # and not another process of that number
            select.select([watched], [], [])  # readable once it has ended (source: man 2 pidfd_open)
    # More than once: a process that is about to be killed may be starting another one.
    deadline = time.monotonic() + _LIMIT_S
    while (carriers := _carriers(token)) and time.monotonic() < deadline:
        for carrier in carriers:
            _kill(carrier)


def _carriers(token: str) -> list[int]:
    """The running processes with this token in their environment; a zombie has none any more."""
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
        return b""  # ended meanwhile, or another user's


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2])
