"""NodeActor: a Ray actor that runs its node's program and moves bytes to and from it, without reading them.

The program ends with the actor, whose pipes then close. The actor watches the raylet and reports its death at once;
Ray itself would end the actor ten seconds later without a reason.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress

from nblaunch import env
from nblaunch.engines.command_node import PROGRAM
from nblaunch.events import ExitStatus
from nblaunch.nodes import network

_READ_BYTES = 1 << 20
_POLL_S = 1.0
_LAST_BYTES = 4096
_LEAVE_S = 2.0


class NodeActor:
    """Runs the node program. Several threads call its methods, but each method only in one thread at a time.

    Args:
        variables: environment variables of the program; None removes a variable.
    """

    def __init__(self, variables: Mapping[str, str | None]) -> None:
        environment = {**env.snapshot()}
        for name, value in variables.items():
            if value is None:
                environment.pop(name, None)
            else:
                environment[name] = value
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 it lives as long as the actor
        program = f"import sys; sys.path[:] = {sys.path!r}; {PROGRAM}"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,
            bufsize=0,
        )
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        self._writing, self._reading = self._process.stdin, self._process.stdout
        self._raylet_fd = _open_process(env.read("RAY_RAYLET_PID"))

    def place(self) -> tuple[str, str]:
        """Return the name of this machine, and the address at which other nodes reach it."""
        import ray

        return os.uname().nodename, str(ray.util.get_node_ip_address()) or network.default_address()

    def poll(self) -> tuple[bytes, str]:
        """Return bytes of the program and the reason for its end; neither if nothing arrives for a second."""
        poller = select.poll()
        poller.register(self._reading.fileno(), select.POLLIN)
        if self._raylet_fd >= 0:
            poller.register(self._raylet_fd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(1000 * _POLL_S)}
        if self._raylet_fd in ready:
            self._process.kill()
            return b"", "its raylet has died"
        if not ready:
            return b"", ""
        data = os.read(self._reading.fileno(), _READ_BYTES)
        return (data, "") if data else (b"", self._how_ended())

    def send(self, data: bytes) -> None:
        """Write bytes to the program; do nothing if it has ended, which :meth:`poll` reports."""
        view = memoryview(data)
        with suppress(OSError, ValueError):
            while view:
                view = view[os.write(self._writing.fileno(), view) :]

    def leave(self) -> None:
        """Close the pipe to the program, which ends it; kill it if it does not end."""
        with suppress(OSError):
            self._writing.close()
        try:
            self._process.wait(_LEAVE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _how_ended(self) -> str:
        try:
            status = ExitStatus(self._process.wait(_POLL_S))
        except subprocess.TimeoutExpired:
            return "it has closed its connection"
        how = f"was {status}" if status.signal_name else f"ended with {status}"
        self._log.seek(max(0, os.fstat(self._log.fileno()).st_size - _LAST_BYTES))
        lines = self._log.read().decode(errors="replace").splitlines()
        words = [line.strip() for line in lines if any(map(str.isalnum, line))][-3:]
        return f"its process {how}" + (f" ({' | '.join(words)})" if words else "")


def _open_process(pid: int) -> int:
    """Return a descriptor that is readable when a process has ended; -1 if the system has none."""
    if not pid or not hasattr(os, "pidfd_open"):
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1
