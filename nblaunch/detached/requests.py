"""Requests to a detached job: a line of text on the Unix socket in its folder, and a text in return.

    kernel, script, shell ── "stop" ──> socket (folder of mode 0700, user of the other end checked) ── job process

Nothing that comes through the socket is unpickled.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from nblaunch.host import descriptors
from nblaunch.launcher.requests import JobRequests

_SOCKET_NAME = "socket"
_CREDENTIALS = struct.Struct("3i")
"""Of the process at the other end: process, user, group. Source: unix(7), SO_PEERCRED."""

_MAX_REQUEST_BYTES = 256
_PATIENCE_S = 2.0
_STACKS_S = 10.0
_RETRY_S = 0.1


class RequestServer:
    """The job process's end: serves requests from now on, in a thread.

    Raises:
        OSError: the file system of the folder takes no sockets.
    """

    def __init__(self, folder: Path, requests: JobRequests) -> None:
        self._requests = requests
        self._closed = threading.Event()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _address_in(folder) as address:
            self._socket.bind(address)
        self._socket.listen(16)
        descriptors.keep_from_children(self._socket.fileno())
        self._thread = threading.Thread(target=self._serve, name="nblaunch-requests", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Serve no more requests."""
        self._closed.set()
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        descriptors.forget(self._socket.fileno())
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # there may be no descriptor left, or the client has gone
                if self._closed.wait(_RETRY_S):
                    return
                continue
            self._serve_one(connection)

    def _serve_one(self, connection: socket.socket) -> None:
        """Serve a request. A client that has gone, or sends nothing or nonsense, does no harm."""
        with suppress(OSError):
            connection.settimeout(_PATIENCE_S)
            is_own = _is_own_user(connection)
            request = connection.recv(_MAX_REQUEST_BYTES).decode(errors="replace").strip() if is_own else ""
            if request == "stacks":
                # They take seconds to find: a stop or an interrupt does not wait for that.
                self._requests.ask_stacks().add_done_callback(partial(_reply_with, connection))
                return
            if request in ("stop", "interrupt", "cancel"):
                getattr(self._requests, request)()
                connection.sendall(b"ok")
            elif request:
                connection.sendall(f"unknown request: {request}".encode())
        connection.close()


def _reply_with(connection: socket.socket, answer: Future[str]) -> None:
    with connection, suppress(OSError):  # the client has gone
        connection.sendall(answer.result().encode())


class RemoteRequests:
    """Requests to a job of another process. Once it has ended, they have no effect."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.interrupts = 0

    def stop(self) -> None:
        """Let the loops of all ranks end at the same step boundary."""
        self._send("stop")

    def interrupt(self) -> None:
        """Ask workers to end, with grace; the second time kill them."""
        self.interrupts += 1
        self._send("interrupt")

    def cancel(self) -> None:
        """Kill the workers at once."""
        self._send("cancel")

    def ask_stacks(self) -> Future[str]:
        """Ask where every rank is."""
        answer: Future[str] = Future()

        def ask() -> None:
            answer.set_result(self._send("stacks") or "no worker of the job runs")

        threading.Thread(target=ask, name="nblaunch-stacks", daemon=True).start()
        return answer

    def _send(self, request: str) -> str:
        """Return the answer; empty where no job process runs."""
        try:
            with _connected(self._folder) as connection:
                connection.settimeout(_STACKS_S + _PATIENCE_S)
                connection.sendall(request.encode())
                return b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode(errors="replace")
        except OSError:
            return ""


def is_served(folder: Path) -> bool:
    """Return whether the process of the job in ``folder`` runs."""
    try:
        with _connected(folder):
            return True
    except BlockingIOError:  # more wait than the system queues: it is only busy, or stopped
        return True
    except OSError as error:
        return descriptors.have_run_out(error)  # of this process: nothing is known of the other


@contextmanager
def _connected(folder: Path) -> Iterator[socket.socket]:
    """Connect with a job process.

    Raises:
        OSError: there is none, or it is not of this user.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, _address_in(folder) as address:
        connection.settimeout(_PATIENCE_S)
        connection.connect(address)
        if not _is_own_user(connection):
            raise PermissionError(f"the process behind {folder / _SOCKET_NAME} is another user's")
        yield connection


def _is_own_user(connection: socket.socket) -> bool:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(data)[1] == os.getuid())


@contextmanager
def _address_in(folder: Path) -> Iterator[str]:
    """Yield the address of the socket: by descriptor, since an address has room for about 100 bytes."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{_SOCKET_NAME}"
    finally:
        os.close(fd)
