"""NodeActor: a Ray actor that runs its node's program and moves bytes to and from it, without reading them.

The program ends when the actor does, because its pipes then close. The actor watches the raylet, reports its death
immediately, and ends soon after. Ray itself would end the actor ten seconds later without giving a reason, or not at
all while the raylet is a zombie.

The code is sent to the node by value and imports only the standard library, because the launch waits for its imports.
"""

from __future__ import annotations

import importlib.util
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress

_READ_BYTES = 1 << 20
_POLL_S = 1.0
_LAST_BYTES = 4096
_LEAVE_S = 2.0
_REPORT_S = 1.0
"""Seconds between the report of the raylet's death and the end of the actor, so that the driver receives the report."""


def leave_out_optional_packages() -> None:
    """Keep Ray from importing packages whose objects this process never sends; the imports would take half a second."""
    for name in ("pyarrow", "pydantic", "starlette"):
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # as if it were not installed


class NodeActor:
    """Runs the node program. Several threads call its methods, but never the same method at the same time.

    Its constructor has no arguments, because Ray would import optional packages to read them.

    Raises:
        ModuleNotFoundError: nblaunch is not installed on the node.
    """

    def __init__(self) -> None:
        leave_out_optional_packages()
        if importlib.util.find_spec("nblaunch") is None:
            raise ModuleNotFoundError("No module named 'nblaunch'")

    def start(self, program: str, variables: Mapping[str, str | None]) -> tuple[str, str]:
        """Start the program; return the name of this machine, and the address at which other nodes reach it.

        Args:
            program: Python code of the program.
            variables: environment variables of the program; None removes a variable.
        """
        import ray

        merged = {**os.environ, **variables}
        environment = {name: value for name, value in merged.items() if value is not None}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 it exists as long as the actor
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {program}"],
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
        self._raylet_fd = _open_process(int(os.environ.get("RAY_RAYLET_PID", "0")))
        return os.uname().nodename, str(ray.util.get_node_ip_address())

    def wait(self) -> tuple[int | None, bytes]:
        """Wait until the program has ended; return its exit code and the last part of its output."""
        self._process.wait()
        return self._end()

    def poll(self) -> tuple[bytes, str | tuple[int | None, bytes]]:
        """Return bytes from the program, or how it ended; return neither if nothing arrives for a second.

        Returns:
            Until the program's output has ended: the bytes that arrived, and an empty string. After that, no bytes and
            either the reason why the program can't be reached, or its exit code (None = it is still running) and the
            last part of its output.
        """
        poller = select.poll()
        poller.register(self._reading.fileno(), select.POLLIN)
        if self._raylet_fd >= 0:
            poller.register(self._raylet_fd, select.POLLIN)
        ready = {fd for fd, _ in poller.poll(1000 * _POLL_S)}
        if self._raylet_fd in ready:
            self._process.kill()
            threading.Timer(_REPORT_S, os._exit, (1,)).start()
            return b"", "its raylet has died"
        if not ready:
            return b"", ""
        data = os.read(self._reading.fileno(), _READ_BYTES)
        return (data, "") if data else (b"", self._end())

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

    def _end(self) -> tuple[int | None, bytes]:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_POLL_S)
        log = self._log.fileno()
        start = max(0, os.fstat(log).st_size - _LAST_BYTES)
        return self._process.returncode, os.pread(log, _LAST_BYTES, start)


def _open_process(pid: int) -> int:
    """Return a descriptor that is readable when a process has ended; -1 if the system has none."""
    if not pid or not hasattr(os, "pidfd_open"):
        return -1
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1
