"""The connection between the kernel and each rank of a session: a Unix socket in a private folder, never a port.

    kernel   Door: listens ── accept(ranks) ──> rank -> Link
    worker   connect(address, key, rank) ──> Link

A process that does not know the key, which only the memory of the workers holds, is not listened to.
"""

from __future__ import annotations

import hmac
import os
import secrets
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from nblaunch.errors import LaunchError
from nblaunch.host import descriptors

_KEY_BYTES = 32
_POLL_S = 0.1
_MAX_PATH = 100
"""The system allows 107 characters for the path of a Unix socket (source: unix(7))."""


class Link:
    """One end of the connection: messages, each with memory files. Of one thread at a time.

    Workers of later jobs inherit the kernel's ends, and close them whenever they drop what refers to them. So the end
    of a session is announced (:class:`~nblaunch.session.messages.Close`), and that of a rank known from its process.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def send(self, message: Any, files: Sequence[int] = ()) -> None:
        """Send a message, and the descriptors of files for the other process.

        Raises:
            OSError: the other process has gone.
        """
        self.connection.send((message, len(files)))
        if files:
            with _socket_of(self.connection) as channel:
                socket.send_fds(channel, [b"."], list(files))

    def receive(self) -> tuple[Any, list[int]]:
        """Wait for a message; return it with descriptors of the files that came with it, to be closed.

        Raises:
            EOFError, OSError: the other process has gone.
        """
        message, num_files = self.connection.recv()
        return message, self._receive_files(num_files) if num_files else []

    def _receive_files(self, count: int) -> list[int]:
        with _socket_of(self.connection) as channel:
            data, files, _, _ = socket.recv_fds(channel, 1, count)
        if not data:
            raise EOFError
        return files

    def close(self) -> None:
        """Close this end."""
        self.connection.close()


def _socket_of(connection: Connection) -> socket.socket:
    return socket.socket(fileno=os.dup(connection.fileno()))


class Door:
    """Where the ranks of a session connect to the kernel.

    Attributes:
        address: path of the socket, in a folder that only this user can enter.
        key: what a rank sends first.

    Raises:
        LaunchError: the system refused a socket or folder.
    """

    def __init__(self) -> None:
        self.key = secrets.token_bytes(_KEY_BYTES)
        try:
            self._folder = _private_folder()
            self.address = os.path.join(self._folder, "session")
            self._listening = socket.socket(socket.AF_UNIX)
            descriptors.keep_from_children(self._listening.fileno())
            self._listening.bind(self.address)
            self._listening.listen(64)
        except OSError as error:
            raise LaunchError(f"the system refused what a session needs: {error}") from error

    def accept(self, ranks: Sequence[int], is_alive: Callable[[], bool]) -> dict[int, Link]:
        """Wait until all ``ranks`` have connected; return rank -> link. Fewer, once ``is_alive()`` says no."""
        links: dict[int, Link] = {}
        self._listening.settimeout(_POLL_S)
        while len(links) < len(ranks) and is_alive():
            try:
                channel, _ = self._listening.accept()
            except TimeoutError:
                continue
            rank = self._greeted(channel)
            if rank in ranks and rank not in links:
                links[rank] = Link(Connection(channel.detach()))
        return links

    def _greeted(self, channel: socket.socket) -> int:
        """Return the rank that has connected; -1 for a process that does not know the key."""
        channel.settimeout(5.0)
        try:
            greeting = _read_exactly(channel, _KEY_BYTES + 4)
        except OSError:
            return -1
        channel.settimeout(None)
        is_known = hmac.compare_digest(greeting[:_KEY_BYTES], self.key)
        return int.from_bytes(greeting[_KEY_BYTES:], "little") if is_known else -1

    def close(self) -> None:
        """Accept no connection any more."""
        descriptors.forget(self._listening.fileno())
        self._listening.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _private_folder() -> str:
    folder = tempfile.mkdtemp(prefix="nblaunch-")
    if len(folder) <= _MAX_PATH - len("/session"):
        return folder
    os.rmdir(folder)
    return tempfile.mkdtemp(prefix="nblaunch-", dir="/tmp")


def _read_exactly(channel: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        chunk = channel.recv(size - len(data))
        if not chunk:
            raise ConnectionError("closed")
        data += chunk
    return data


def connect(address: str, key: bytes, rank: int) -> Link:
    """Connect a rank with the kernel.

    Raises:
        OSError: the session has been closed.
    """
    channel = socket.socket(socket.AF_UNIX)
    channel.connect(address)
    channel.sendall(key + rank.to_bytes(4, "little"))
    return Link(Connection(channel.detach()))
