"""A process that has imported everything and forks launches, because importing torch for each would take seconds.

    test ── order, environment, where its output goes ──> warm process ── fork ──> launch, in the machine's namespace
         <──────────────────── its process id ─────────────┘

Processes that a launch leaves behind become children of its warm process, which finds them. The other end of
:class:`Warm` is :func:`main`, called as ``python -m tests.nodes.warm <descriptor>``.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn, TextIO

import psutil

from tests.left_behind import adopt_orphans

_ROOT = Path(__file__).parents[2]
_MAX_BYTES = 1 << 16
_CLONE_NEWNET = 0x40000000  # linux/sched.h


class Warm:
    """The warm process of one machine, for all tests."""

    def __init__(self) -> None:
        self._socket, its = socket.socketpair()
        with its:
            command = [sys.executable, "-u", "-m", "tests.nodes.warm", str(its.fileno())]
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=[its.fileno()], cwd=_ROOT, start_new_session=True
            )

    def launch(
        self, order: dict[str, Any], env: dict[str, str], namespace: str
    ) -> tuple[psutil.Process, TextIO]:
        """Launch a job of ``jobs.py``; return its process and its output."""
        reading, writing = os.pipe()
        request = {"order": order, "env": env, "namespace": namespace}
        socket.send_fds(self._socket, [json.dumps(request).encode()], [writing])
        os.close(writing)
        pid = int(self._socket.recv(_MAX_BYTES))
        return psutil.Process(pid), os.fdopen(reading)

    def processes(self) -> list[psutil.Process]:
        """Return all descendants of the warm process."""
        found = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            try:
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found

    def close(self) -> None:
        self._socket.close()
        self._process.wait(180)


def main() -> None:
    """Serve until the tests close their end."""
    # The first optimizer imports torch._dynamo, which takes a second in each launch.
    import torch._dynamo  # noqa: F401

    from tests.nodes import jobs

    adopt_orphans()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system reaps them
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        while True:
            text, descriptors, _, _ = socket.recv_fds(channel, _MAX_BYTES, 1)
            if not text:
                os._exit(0)  # fork at once, while only imports have opened files
            pid = os.fork()
            if pid == 0:
                channel.close()
                _become_launch(jobs.main, json.loads(text), descriptors[0])
            os.close(descriptors[0])
            channel.send(str(pid).encode())


def _become_launch(run: Any, request: dict[str, Any], output: int) -> NoReturn:
    exit_code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in (1, 2):
            os.dup2(output, fd)
        os.close(output)
        os.environ.update(request["env"])
        if request["namespace"]:
            _enter(request["namespace"])
        run(request["order"])
        exit_code = 0
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(exit_code)


def _enter(namespace: str) -> None:
    """Enter a network namespace that ``ip netns add`` has created."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"can't enter {namespace}")


if __name__ == "__main__":
    main()
