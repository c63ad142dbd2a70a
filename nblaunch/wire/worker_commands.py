"""Commands that the kernel sends to a worker for a session or the debugger, their replies, and the connection.

    kernel ── CommandConnection ══ socketpair ══ CommandConnection ── worker

A worker has one connection for sessions and the debugger. It is created before the worker starts and has no address:
only the kernel, the worker and processes that the worker forks hold an end of it. Messages can therefore safely be
pickled, like events (``channel.py``); memory files carry objects of the user's classes. The worker reports on a session
command with events (:class:`nblaunch.events.CommandEvent`), and answers a numbered debugger command with a
:class:`Reply`.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nblaunch.events import Failed, ValueLocation
from nblaunch.host import descriptors
from nblaunch.wire import outbox
from nblaunch.wire.argument_paths import ArgPath
from nblaunch.wire.channel import dump_plain
from nblaunch.wire.outbox import Outbox, RankResult

_HEADER = struct.Struct("<Q")
"""Number of bytes of the message."""

_MAX_FILES = 4
_MAX_READ_BYTES = 1 << 20
NO_DESCRIPTOR = "the process had no file descriptor left to receive data; close files, or raise `ulimit -n`"
"""Why a message arrived without its files."""


class CommandConnection:
    """One end of the connection, for messages with memory files. Any thread may send; only one at a time may receive.

    Processes that a worker has forked may hold its end open. The kernel therefore announces the end of a session
    (:class:`Close`), and detects the end of a worker through its process.

    The descriptor stays open as long as the object exists. The object can't be used in forked processes.

    Args:
        fd: a socket, which this object then owns.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        os.set_blocking(fd, True)  # the user's socket.setdefaulttimeout() makes new sockets non-blocking
        self._pid = os.getpid()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """Return the descriptor, for ``select``."""
        return self._fd

    def send(self, message: Any, files: Sequence[int] = ()) -> None:
        """Send a message, and the descriptors of at most four files for the other process.

        Raises:
            OSError: the other process is gone.
            Exception: the message contains an object of a user's class that can't be converted to plain types; nothing
                is sent.
        """
        data = dump_plain(message)
        rest = memoryview(_HEADER.pack(len(data)) + data)
        with self._sending:
            if files:
                with _socket_of(self._fd) as unix_socket:
                    rest = rest[socket.send_fds(unix_socket, [rest], list(files)) :]
            while rest:
                rest = rest[os.write(self._fd, rest) :]

    def receive(self) -> tuple[Any, list[int]]:
        """Wait for a message; return it with descriptors of its files, which the caller must close.

        If this process has no descriptors left, the files are lost.

        Raises:
            EOFError, OSError: the other process is gone.
        """
        with _socket_of(self._fd) as unix_socket:
            start, files, _, _ = socket.recv_fds(unix_socket, _HEADER.size, _MAX_FILES)
        try:
            (size,) = _HEADER.unpack(self._read_rest(start, _HEADER.size))
            return pickle.loads(self._read_rest(b"", size)), files
        except BaseException:
            for fd in files:
                os.close(fd)
            raise

    def _read_rest(self, start: bytes, size: int) -> bytearray:
        """Return ``size`` bytes that begin with ``start``."""
        data = bytearray(start)
        while len(data) < size:
            chunk = os.read(self._fd, min(size - len(data), _MAX_READ_BYTES))
            if not chunk:
                raise EOFError
            data += chunk
        return data

    def __del__(self) -> None:
        # A forked child closed the descriptor immediately, and may use its number for another file.
        if self._pid == os.getpid():
            descriptors.close(self._fd)


def connect() -> tuple[CommandConnection, int]:
    """Return a new connection's ends: the kernel's, which no forked child keeps, and the worker's.

    Raises:
        OSError: the system could not create a socket pair.
    """
    kernel_end, worker_end = socket.socketpair()
    descriptors.keep_from_children(kernel_end.fileno())
    return CommandConnection(kernel_end.detach()), descriptors.moved_high(worker_end.detach())


@contextmanager
def _socket_of(fd: int) -> Iterator[socket.socket]:
    """Yield a socket object for a descriptor, without using another descriptor."""
    unix_socket = socket.socket(fileno=fd)
    try:
        unix_socket.setblocking(True)  # as in CommandConnection
        yield unix_socket
    finally:
        unix_socket.detach()


# --- to the server of a session --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SessionCommand:
    """A command to a rank of a session. The last of its files is the outbox for its results (``wire/outbox.py``).

    Args:
        number: number of this command, which its events repeat; 0 = nothing waits for them.
        group: number of the process group that the rank must be in, counted from 1; 0 = the current one.
        has_breakpoints: whether ``breakpoint()`` opens pdb in the worker, with the user's input coming from the kernel;
            False = skip it.
    """

    number: int = 0
    group: int = 0
    has_breakpoints: bool = False


@dataclass(frozen=True)
class Execute(SessionCommand):
    """Code to run as a cell, in ``__main__``.

    Args:
        code: Python with IPython's extensions, if the rank has IPython.
        filename: its file name in tracebacks.
        first_line: number of its first line in ``source``.
        source: source text for tracebacks; empty = ``code``.
        shows_value: whether to display the value of the last expression; False = return it.
    """

    code: str = ""
    filename: str = ""
    first_line: int = 1
    source: str = ""
    shows_value: bool = False

    @property
    def is_name(self) -> bool:
        """Whether the code only reads a variable, so ranks do not have to wait for each other."""
        return self.code.isidentifier()


@dataclass(frozen=True)
class SetVariables(SessionCommand):
    """Variables to set in ``__main__``; the first of the files holds the values."""


@dataclass(frozen=True)
class RunFunction(SessionCommand):
    """A function to call as a job would; the first of the files holds the call.

    Args:
        returns_all: whether every rank returns its value; False = only rank 0 does.
        wanted_modules: as in ``wire/assignment.py``.
    """

    returns_all: bool = False
    wanted_modules: tuple[ArgPath, ...] = ()


@dataclass(frozen=True)
class LeaveGroup(SessionCommand):
    """Request to leave the process group, because other ranks are waiting for this one, which will not arrive.

    It has no files, and no events report on it.
    """


@dataclass(frozen=True)
class Close(SessionCommand):
    """Request to end the worker."""


# --- to the debugger in a worker, which handles commands while the function or a session command is running
# ----------------


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
        function: name and first line of the function whose innermost frame is described. If it is None, or the function
            is not running, the innermost frame of the user's code is described.
        number: number of this command; the reply repeats it.
    """

    function: tuple[str, int] | None = None
    number: int = 0


@dataclass(frozen=True)
class Debug(DebugCommand):
    """Open pdb at the innermost frame of the user's code; :class:`Prompted` and :class:`Line` messages follow."""


@dataclass(frozen=True)
class Line(DebugCommand):
    """A line for pdb, without its line ending."""

    text: str = ""


@dataclass(frozen=True)
class Release(DebugCommand):
    """End a worker that was kept after its function failed."""


# --- from the debugger -----------------------------------------------------------------------------------------------


PDB_PROMPT = "(Pdb) "
"""Pdb's main prompt. At its other prompts (rest of a statement, ``debug``), ``c`` does not continue."""


@dataclass(frozen=True)
class Prompted:
    """Pdb waits for a line.

    Args:
        text: its output since the last line, without the prompt.
        stop: identifies a ``breakpoint()`` by file, line and count; None in later prompts, and in post-mortem pdb.
            Ranks that run the same code have equal stops.
        prompt: pdb's prompt, which is different on continuation lines and while a breakpoint's commands are entered.
    """

    text: str
    stop: tuple[str, int, int] | None = None
    prompt: str = PDB_PROMPT


@dataclass(frozen=True)
class Resumed:
    """The user left pdb. ``text`` is its output since the last line."""

    text: str = ""


@dataclass(frozen=True)
class FrameVariables:
    """The local variables of a frame.

    Args:
        function: its name and first line.
        filename: file of the code.
        line: current line of the frame.
        aspects: name of an aspect of a variable, such as ``batch.shape`` -> its text.
        stack: name and first line of each running function of the user's code, innermost first.
    """

    function: tuple[str, int]
    filename: str
    line: int
    aspects: Mapping[str, str]
    stack: Sequence[tuple[str, int]] = ()


# --- replies, with an outbox for values of any type ------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """The debugger's reply to a command. If it has a location, the outbox with the value follows as a memory file.

    Args:
        number: number of the command.
        failed: the exception that the command raised.
        value: value of an expression, if its type is one of :data:`PLAIN_TYPES`, or a :class:`FrameVariables`.
        location: place of any other value in the outbox (``wire/outbox.py``).
    """

    number: int = 0
    failed: Failed | None = None
    value: Any = None
    location: ValueLocation | None = None

    @classmethod
    def of_value(cls, number: int, value: Any, outbox_fd: int) -> Reply:
        """Return a reply with ``value``, which is in the outbox unless its type is plain."""
        # A class derived from a plain type, such as an IntEnum, may be missing from the other process.
        if type(value) in PLAIN_TYPES:
            return cls(number, value=value)
        return cls(number, location=Outbox(outbox_fd).put_value(value))


PLAIN_TYPES = (type(None), bool, int, float, str)
"""Types of values that are sent in the reply itself."""


@dataclass(frozen=True)
class ReceivedReply:
    """A rank's reply, and the contents of its outbox."""

    reply: Reply
    result: RankResult

    @classmethod
    def of(cls, reply: Reply, files: Sequence[int]) -> ReceivedReply:
        """Read the files of a reply, and close them."""
        try:
            if reply.location is None:
                return cls(reply, RankResult(value=reply.value))
            if not files:
                return cls(reply, RankResult(value_error=NO_DESCRIPTOR))
            return cls(reply, outbox.read(files[0], reply.location, {}))
        finally:
            for fd in files:
                os.close(fd)


def send_reply(connection: CommandConnection, reply: Reply, outbox_fd: int) -> None:
    """Send a reply, together with its outbox if the reply has one.

    Raises:
        OSError: the other process is gone.
    """
    connection.send(reply, [] if reply.location is None else [outbox_fd])
