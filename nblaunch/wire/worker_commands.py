"""Commands from the kernel to a worker, for a session or for the debugger; replies; and their connection.

    kernel ── CommandConnection ══ socketpair ══ CommandConnection ── worker

A session and a debugger have a connection each, which is made before the worker starts and has no address: only kernel
and worker, and processes that a worker forks, have an end of it. So messages are pickled, as events are
(``channel.py``); objects of the user's classes go by memory files. A worker sends a :class:`Reply` to each command of a
session but :class:`Close`, and to each command to the debugger that has a number.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from nblaunch.events import Failed, Interrupted, Returned, StateSent, ValueLocation
from nblaunch.host import descriptors
from nblaunch.wire import outbox
from nblaunch.wire.argument_paths import ArgPath
from nblaunch.wire.channel import dump_plain
from nblaunch.wire.outbox import Outbox, RankResult

_HEADER = struct.Struct("<QI")
"""Bytes of the message, number of the files that follow it."""

_MAX_READ_BYTES = 1 << 20
NO_DESCRIPTOR = "the process had no file descriptor left to receive it; close files, or raise `ulimit -n`"
"""Why a message has arrived without its files."""


class CommandConnection:
    """One end of the connection: messages, each with memory files. One thread at a time may use it.

    Processes that a worker has forked may hold its end open. So the kernel announces the end of a session
    (:class:`Close`), and detects the end of a worker by its process.

    The descriptor lives as long as anything refers to the object. The object can't be used in forked processes.

    Args:
        fd: a socket, which this object owns from now on.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        os.set_blocking(fd, True)  # socket.setdefaulttimeout() of the user makes new sockets non-blocking
        self._pid = os.getpid()

    def fileno(self) -> int:
        """Return the descriptor, for ``select``."""
        return self._fd

    def send(self, message: Any, files: Sequence[int] = ()) -> None:
        """Send a message, and the descriptors of files for the other process.

        Raises:
            OSError: the other process has gone.
            Exception: it holds an object of a user's class that can't be made plain; nothing is sent.
        """
        data = dump_plain(message)
        rest = memoryview(_HEADER.pack(len(data), len(files)) + data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]
        if files:
            with _socket_of(self._fd) as unix_socket:
                socket.send_fds(unix_socket, [b"."], list(files))

    def receive(self) -> tuple[Any, list[int]]:
        """Wait for a message; return it with descriptors of the files that came with it, to be closed.

        Files for which this process has no descriptors left are lost.

        Raises:
            EOFError, OSError: the other process has gone.
        """
        size, num_files = _HEADER.unpack(self._read(_HEADER.size))
        data = self._read(size)
        files = self._receive_files(num_files) if num_files else []
        return pickle.loads(data), files

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


@contextmanager
def _socket_of(fd: int) -> Iterator[socket.socket]:
    """Yield a socket object of a descriptor, for which no other descriptor is needed."""
    unix_socket = socket.socket(fileno=fd)
    try:
        unix_socket.setblocking(True)  # as in CommandConnection
        yield unix_socket
    finally:
        unix_socket.detach()


# --- to the server of a session --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SessionCommand:
    """A command to a rank of a session.

    Args:
        group: number of the process group that the rank must be in, counted from 1; 0 = as it is.
        has_breakpoints: ``breakpoint()`` opens pdb in the worker, typed into the kernel; otherwise it is passed over.
    """

    group: int = 0
    has_breakpoints: bool = False


@dataclass(frozen=True)
class Execute(SessionCommand):
    """Code to run as a cell, in ``__main__``.

    Args:
        code: Python with IPython's extensions, where the rank has IPython.
        filename: under which tracebacks name it.
        first_line: number of its first line in the source that ``source`` holds.
        source: for tracebacks; empty = ``code``.
        shows_value: whether the value of a last expression is displayed; False = it is returned.
    """

    code: str = ""
    filename: str = ""
    first_line: int = 1
    source: str = ""
    shows_value: bool = False

    @property
    def is_name(self) -> bool:
        """Whether it only reads a variable, for which no rank needs another."""
        return self.code.isidentifier()


@dataclass(frozen=True)
class SetVariables(SessionCommand):
    """Variables to set in ``__main__``; the values follow as a memory file."""


@dataclass(frozen=True)
class RunFunction(SessionCommand):
    """A function to call as a job does; the call follows as a memory file.

    Args:
        returns_all: whether every rank returns its value; False = only rank 0 does.
        wanted_modules: as in ``wire/assignment.py``.
    """

    returns_all: bool = False
    wanted_modules: tuple[ArgPath, ...] = ()


@dataclass(frozen=True)
class LeaveGroup(SessionCommand):
    """Request to leave the process group, in which another rank waits for this one in vain."""


@dataclass(frozen=True)
class Close(SessionCommand):
    """Request to end the worker."""


# --- to the debugger in a worker, which is served while the function, or a command of a session, runs ----------------


@dataclass(frozen=True)
class DebugCommand:
    """A command to the debugger in a worker."""


@dataclass(frozen=True)
class Inspect(DebugCommand):
    """Evaluate an expression in the innermost frame of the user's code.

    Args:
        expression: a Python expression.
        number: number of this command; the reply repeats it.
    """

    expression: str = ""
    number: int = 0


@dataclass(frozen=True)
class ReadVariables(DebugCommand):
    """Describe the local variables of a frame; the reply's value is a :class:`FrameVariables`.

    Args:
        function: name and first line of the function whose innermost frame is meant; None, or one that is not running:
            the innermost frame of the user's code.
        number: number of this command; the reply repeats it.
    """

    function: tuple[str, int] | None = None
    number: int = 0


@dataclass(frozen=True)
class Debug(DebugCommand):
    """Open pdb at the innermost frame of the user's code; :class:`Prompted` and :class:`Line` follow."""


@dataclass(frozen=True)
class Line(DebugCommand):
    """A line for pdb, without its end."""

    text: str = ""


@dataclass(frozen=True)
class Release(DebugCommand):
    """End a worker that is kept where its function failed."""


# --- from the debugger -----------------------------------------------------------------------------------------------


PDB_PROMPT = "(Pdb) "
"""Pdb's main prompt. At the prompts for the rest of a statement, ``interact`` and ``debug``, ``c`` resumes nothing."""

CONSOLE_PROMPT = ">>> "
"""The prompt of pdb's ``interact``."""


@dataclass(frozen=True)
class Prompted:
    """Pdb waits for a line.

    Args:
        text: what it has printed since the last line, without the prompt.
        stop: identifies a ``breakpoint()`` that was reached, by file, line and how often; None after that, and in pdb
            of a failure. It is the same on every rank that runs the same code.
        prompt: what pdb asks with: another one for the rest of a statement, for the commands of a breakpoint, or in
            its ``interact``.
    """

    text: str
    stop: tuple[str, int, int] | None = None
    prompt: str = PDB_PROMPT


@dataclass(frozen=True)
class Resumed:
    """Pdb was left. ``text`` is what it has printed since the last line."""

    text: str = ""


@dataclass(frozen=True)
class FrameVariables:
    """The local variables of a frame.

    Args:
        function: its name, and the line where it begins.
        filename: file of the code.
        line: line where the frame stands.
        aspects: name of an aspect of a variable, as ``batch.shape`` -> its text.
        stack: name and first line of each function of the user's code that runs, innermost first.
    """

    function: tuple[str, int]
    filename: str
    line: int
    aspects: Mapping[str, str]
    stack: Sequence[tuple[str, int]] = ()


# --- replies, with an outbox for values of any type ------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """The reply to a command. Its outbox follows as a memory file if there is something in it.

    Args:
        time_s: when it ended, by the wall clock.
        failed: the exception that the command raised.
        value: value of an expression, if its type is one of :data:`PLAIN_TYPES`.
        interrupted: the user's interrupt has ended a call.
        returned: where any other value lies in the outbox (``wire/outbox.py``).
        sent_states: where the module states of a call lie in the outbox, by argument path.
        shown: a display of the value, by MIME type, where that was asked for.
        number: number of the command, if it has one.
        has_torch: whether the rank of a session has imported torch.
        is_preliminary: another reply to the same command follows. This one says what would be there without it.
    """

    time_s: float = 0.0
    failed: Failed | None = None
    interrupted: Interrupted | None = None
    value: Any = None
    returned: Returned | None = None
    sent_states: Mapping[ArgPath, StateSent] = field(default_factory=dict)
    shown: Mapping[str, Any] = field(default_factory=dict)
    number: int = 0
    has_torch: bool = False
    is_preliminary: bool = False

    @property
    def has_outbox(self) -> bool:
        """Whether its outbox comes with it."""
        return self.returned is not None or self.interrupted is not None

    @classmethod
    def of_value(cls, rank: int, value: Any, outbox_fd: int) -> Reply:
        """Return the reply that brings ``value``, which is in the outbox if it is not of a plain type."""
        if type(value) in PLAIN_TYPES:  # a derived class, as an IntEnum, may not exist in the other process
            return cls(value=value)
        location = Outbox(outbox_fd).put_value(value)
        return cls(returned=Returned(rank, time.time(), value_location=location))


PLAIN_TYPES = (type(None), bool, int, float, str)
"""Types of values that travel in the reply itself."""


@dataclass(frozen=True)
class ReceivedReply:
    """What a rank replied, and what lay in the outbox that came with it."""

    reply: Reply
    result: RankResult

    @classmethod
    def of(cls, reply: Reply, files: Sequence[int]) -> ReceivedReply:
        """Read what came with a reply, and close its files."""
        try:
            if not reply.has_outbox:
                return cls(reply, RankResult(value=reply.value))
            if not files:
                return cls(reply, RankResult(value_error=NO_DESCRIPTOR))
            location = reply.returned.value_location if reply.returned is not None else ValueLocation()
            return cls(reply, outbox.read(files[0], location, reply.sent_states))
        finally:
            for fd in files:
                os.close(fd)

    def value_of(self, rank: int) -> Any:
        """Return the value of the reply of ``rank``.

        Raises:
            ValueError: it can't be rebuilt in this process.
        """
        if self.result.value_error:
            raise ValueError(
                f"the value of rank {rank} can't be rebuilt in the kernel: {self.result.value_error}"
            )
        return self.result.value


def send_reply(connection: CommandConnection, reply: Reply, outbox_fd: int) -> None:
    """Send a reply, with its outbox if there is something in it.

    Raises:
        OSError: the other process has gone.
    """
    connection.send(reply, [outbox_fd] if reply.has_outbox else [])
