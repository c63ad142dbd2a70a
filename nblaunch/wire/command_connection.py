"""The connection on which the kernel sends a worker commands: a pair of sockets, made before the worker starts.

    kernel ── CommandConnection ══ socketpair ══ CommandConnection ── worker

It has no address: only these two processes, and those that a worker forks, have an end of it.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
from collections.abc import Sequence
from typing import Any

from nblaunch.host import descriptors

_HEADER = struct.Struct("<QI")
"""Bytes of the message, number of the files that follow it."""

_MAX_READ_BYTES = 1 << 20


class CommandConnection:
    """One end of the connection: messages, each with memory files. Of one thread at a time.

    Processes that a worker has forked may hold its end open. So the end of a session is announced
    (:class:`~nblaunch.wire.session_messages.Close`), and that of a worker known from its process.

    The descriptor lives as long as anything refers to the object. In forked processes the object is of no use.

    Args:
        fd: a socket, which this object owns from now on.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pid = os.getpid()

    def fileno(self) -> int:
        """Return the descriptor, for ``select``."""
        return self._fd

    def send(self, message: Any, files: Sequence[int] = ()) -> None:
        """Send a message, and the descriptors of files for the other process.

        Raises:
            OSError: the other process has gone.
        """
        data = pickle.dumps(message)
        rest = memoryview(_HEADER.pack(len(data), len(files)) + data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        if files:
            with _socket_of(self._fd) as unix_socket:
                socket.send_fds(unix_socket, [b"."], list(files))

    def receive(self) -> tuple[Any, list[int]]:
        """Wait for a message; return it with descriptors of the files that came with it, to be closed.

        Raises:
            EOFError, OSError: the other process has gone.
        """
        size, num_files = _HEADER.unpack(self._read(_HEADER.size))
        message = pickle.loads(self._read(size))
        return message, self._receive_files(num_files) if num_files else []

    def _read(self, size: int) -> bytearray:
        data = bytearray()
        while len(data) < size:
            chunk = os.read(self._fd, min(size - len(data), _MAX_READ_BYTES))
            if not chunk:
                raise EOFError
            data += chunk
        return data

    def _receive_files(self, count: int) -> list[int]:
        with _socket_of(self._fd) as unix_socket:
            data, files, _, _ = socket.recv_fds(unix_socket, 1, count)
        if not data:
            raise EOFError
        return files

    def __del__(self) -> None:
        # A forked child had it closed at once, and may use the number otherwise.
        if self._pid == os.getpid():
            descriptors.close(self._fd)


def connect() -> tuple[CommandConnection, int]:
    """Return the kernel's end of a new connection, which no forked child keeps, and the worker's.

    Raises:
        OSError: the system refused a pair of sockets.
    """
    own, other = socket.socketpair()
    descriptors.keep_from_children(own.fileno())
    return CommandConnection(own.detach()), other.detach()


def _socket_of(fd: int) -> socket.socket:
    return socket.socket(fileno=os.dup(fd))
