"""Requests to a detached job: a line of text on a Unix socket, and text as the reply.

    kernel, script, shell ── "stop" ──> socket in the folder (mode 0700)  ──┐  user of the other
                                    └─> socket with its own name (Linux)    ┴─ end checked ── job process

The second socket does not depend on the folder, so a job whose folder was removed can still be found. Data from a
socket is never unpickled.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nblaunch.errors import warn
from nblaunch.host import descriptors, exhaustion, files, proc
from nblaunch.launcher.requests import JobRequests

TAKEN = "ok"
"""The reply to a request that ends the job. This reply and these requests are the same in all versions of nblaunch."""

_SOCKET_NAME = "socket"
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of the other end. Source: unix(7), SO_PEERCRED."""

_MAX_REQUEST_BYTES = 256
_PATIENCE_S = 2.0
_STACKS_S = 10.0
_RETRY_S = 0.1
_FULL_S = 0.02
_LOOK_S = 1.0

_HAS_NAMES = sys.platform == "linux"
"""Whether sockets can have names that are not files. Source: unix(7), abstract."""


def new_address() -> str:
    """Return a name for the second socket of a job; empty if the system does not support such names."""
    return f"nblaunch-{os.getuid()}-{secrets.token_hex(8)}" if _HAS_NAMES else ""


def served_addresses() -> list[str]:
    """Return the second socket's name for each of this user's job processes that this process can reach."""
    beginning = f"@nblaunch-{os.getuid()}-"
    names = (line.rpartition(" ")[2] for line in proc.read("/proc/net/unix").splitlines())
    return sorted({name[1:] for name in names if name.startswith(beginning)})


@dataclass(frozen=True)
class Endpoint:
    """The sockets on which a job process serves requests.

    Args:
        folder: folder of the job.
        address: name of the second socket; empty = none.
    """

    folder: Path
    address: str = ""

    def is_served(self) -> bool:
        """Return whether the process of the job is running."""
        try:
            with self.connected():
                return True
        except BlockingIOError:  # the system's queue is full: the process exists, but is busy or stopped
            return True
        except OSError as error:
            # If this process has no descriptors left, the state of the job process is unknown.
            return exhaustion.is_exhausted(error)

    def ask(self, request: str, timeout_s: float = _PATIENCE_S) -> str:
        """Return the reply to a request; empty if no job process replies.

        While too many other requests are waiting, for example because many processes attach at the same time, this one
        also waits.
        """
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                with self.connected() as connection:
                    connection.settimeout(timeout_s)
                    connection.sendall(request.encode())
                    return b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode(errors="replace")
            except BlockingIOError:
                if time.monotonic() >= until_s:
                    return ""
                time.sleep(_FULL_S)
            except OSError:
                return ""

    @contextmanager
    def connected(self) -> Iterator[socket.socket]:
        """Connect to the job process.

        Raises:
            OSError: no job process serves requests, or another user owns it.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(_PATIENCE_S)
            self._connect(connection)
            if not _is_own_user(connection):
                raise PermissionError(
                    f"the process behind the socket of {self.folder} belongs to another user"
                )
            yield connection

    def _connect(self, connection: socket.socket) -> None:
        try:
            with address_in(self.folder) as address:
                connection.connect(address)
        except BlockingIOError:
            raise
        except OSError as error:
            if not self.address or exhaustion.is_exhausted(error):
                raise
            connection.connect(f"\0{self.address}")


class RequestServer:
    """Serves requests in a thread of the job process.

    Args:
        endpoint: the sockets.
        requests: receives the requests to the job.
        questions: text of a request -> function that returns the reply.

    Raises:
        OSError: neither socket can be created.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        requests: JobRequests,
        questions: Mapping[str, Callable[[], str]] | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._requests = requests
        self._questions = questions or {}
        self._closed = threading.Event()
        self._poller = select.poll()
        self._sockets: dict[int, socket.socket] = {}
        problems = [self._listen_in_folder()]
        if endpoint.address:
            problems.append(self._listen(f"\0{endpoint.address}"))
        if not self._sockets:
            raise next(problem for problem in problems if problem is not None)
        self._thread = threading.Thread(target=self._serve, name="nblaunch-requests", daemon=True)
        self._thread.start()

    def restore(self) -> None:
        """If the socket in the folder has been removed, create it again."""
        with suppress(OSError), files.private_folder(self._endpoint.folder) as fd:
            try:
                os.stat(_SOCKET_NAME, dir_fd=fd, follow_symlinks=False)
            except FileNotFoundError:
                self._listen_in_folder()

    def close(self) -> None:
        """Stop serving requests."""
        self._closed.set()
        for listening in self._sockets.values():
            listening.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for listening in self._sockets.values():
            descriptors.forget(listening.fileno())
            listening.close()

    def _listen_in_folder(self) -> OSError | None:
        try:
            with address_in(self._endpoint.folder) as address:
                return self._listen(address)
        except OSError as error:
            return error

    def _listen(self, address: str) -> OSError | None:
        """Listen on an address. If that fails, for example on a file system without sockets, return the error."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(address)
            listening.listen(16)
        except OSError as error:
            listening.close()
            return error
        listening.settimeout(_PATIENCE_S)
        descriptors.keep_from_children(listening.fileno())
        self._sockets[listening.fileno()] = listening
        self._poller.register(listening.fileno(), select.POLLIN)
        return None

    def _serve(self) -> None:
        while not self._closed.is_set():
            # Sockets that are added later are polled in the next round.
            for fd, _ in self._poller.poll(_LOOK_S * 1000):
                if self._closed.is_set():
                    return
                try:
                    connection, _ = self._sockets[fd].accept()
                except OSError:  # there may be no descriptor left, or the client has ended
                    self._closed.wait(_RETRY_S)
                    continue
                self._serve_one(connection)

    def _serve_one(self, connection: socket.socket) -> None:
        """Serve a request. A client that has ended, or that sends nothing or garbage, does no harm."""
        with suppress(OSError):
            connection.settimeout(_PATIENCE_S)
            is_own = _is_own_user(connection)
            request = connection.recv(_MAX_REQUEST_BYTES).decode(errors="replace").strip() if is_own else ""
            if request == "stacks":
                # Stacks take seconds to collect; a stop or an interrupt must not wait for them.
                self._requests.ask_stacks().add_done_callback(partial(_reply_with, connection))
                return
            if request in ("stop", "interrupt", "cancel"):
                getattr(self._requests, request)()
                connection.sendall(TAKEN.encode())
            elif request in self._questions:
                connection.sendall(self._questions[request]().encode())
            elif request:
                connection.sendall(f"unknown request: {request}".encode())
        connection.close()


def _reply_with(connection: socket.socket, reply: Future[str]) -> None:
    with connection, suppress(OSError):  # the client has ended
        connection.sendall(reply.result().encode())


class RemoteRequests:
    """Requests to a job in another process. They have no effect once the job has ended.

    A warning is shown if the process is running but does not reply.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self.interrupts = 0

    def stop(self) -> None:
        """Ask the loops of all ranks to end at the same step."""
        self._request("stop")

    def interrupt(self) -> None:
        """Interrupt the workers, with a grace period; the second call kills them."""
        self.interrupts += 1
        self._request("interrupt")

    def cancel(self) -> None:
        """Kill the workers immediately."""
        self._request("cancel")

    def _request(self, request: str) -> None:
        if self._endpoint.ask(request) != TAKEN and self._endpoint.is_served():
            warn(
                f"the process of {self._endpoint.folder.name} did not reply to the request ({request}) within "
                f"{_PATIENCE_S:g} s, because it is busy or stopped. The process may carry out the request later; "
                "`nblaunch jobs` shows its status"
            )

    def ask_stacks(self) -> Future[str]:
        """Ask the job process for the stacks of all ranks."""
        reply: Future[str] = Future()

        def ask() -> None:
            text = self._endpoint.ask("stacks", _STACKS_S + _PATIENCE_S)
            reply.set_result(text or "no worker of the job is running")

        threading.Thread(target=ask, name="nblaunch-stacks", daemon=True).start()
        return reply


def _is_own_user(connection: socket.socket) -> bool:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return bool(_CREDENTIALS.unpack(data)[1] == os.getuid())


@contextmanager
def address_in(folder: Path) -> Iterator[str]:
    """Yield a short address for the socket, through a descriptor: an address can have only about 100 bytes."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{_SOCKET_NAME}"
    finally:
        os.close(fd)
