"""Events between processes: pickled, and sent in packets through a pipe.

    worker      ── EventSender ──┐
    its data loader's process  ──┴──> pipe ──> EventReceiver ── launcher's wait loop

This pipe carries only messages from workers. The launcher reaches workers through signals, through proposals on the
board (``stop_agreement.py``), and, in sessions and for the debugger, through a socket (``worker_commands.py``). It
exchanges messages with its node's agent through one pipe in each direction (``nodes/messages.py``). The receiving end
never blocks, so one silent worker can't hold up the others; a sender waits while the pipe is full.

The events of a detached job are stored in a file in the same format, each with a signature (``detached/``).

Threads, signal handlers and forked children of a worker share its pipe and send without a lock: each packet identifies
its event by a random number, and is small enough for the system to write it in one piece, even if others are writing at
the same time (source: pipe(7), PIPE_BUF). If a sender is killed or interrupted in the middle of an event, that event
stays incomplete, but every other event arrives whole.

A class from the user's script or notebook may not exist in the receiving process, for example if this is a fresh
interpreter or a launcher that runs scripts, or if the class is inside a function. The pickle of an event therefore
names only classes of nblaunch and of ``builtins``; other values are converted to Python's own types (:func:`plain`), so
that any process can read them.
"""

from __future__ import annotations

import enum
import errno
import io
import os
import pickle
import select
import struct
import sys
from collections.abc import Iterator, Mapping, Set
from contextlib import suppress
from types import BuiltinFunctionType
from typing import Any

from nblaunch.events import Event, Note
from nblaunch.wire import signing

_HEADER = struct.Struct("<8sQ")
"""Header of a packet: the id of its event, and the number of the event's remaining bytes, including this packet."""

_BODY_BYTES = select.PIPE_BUF - _HEADER.size
_READ_BYTES = 1 << 18


class EventSender:
    """The worker's end. Threads, signal handlers and forked processes may share it.

    Args:
        fd: write end of the pipe.
        key: key to sign events with (``wire/signing.py``); b"" for a pipe, which has no name.
    """

    def __init__(self, fd: int, key: bytes = b"") -> None:
        self.fd = fd
        self._key = key
        self._pipe = os.fstat(fd)

    def send(self, event: Event) -> None:
        """Write one whole event. Ignore a missing launcher, because its workers are also about to end.

        Raises:
            OSError: this process has closed the descriptor; its number may now belong to another file.
        """
        try:
            body = dump_plain(event)
        except Exception as error:  # the event contains an object of the user's code
            kind = type(event).__name__
            text = f"an event could not be sent and is lost: {kind!r} ({type(error).__name__}: {error})"
            body = dump_plain(Note(event.rank, event.time_s, text, "warning"))
        if not os.path.samestat(os.fstat(self.fd), self._pipe):
            closed = "the pipe to the launcher was closed in this process, perhaps by os.closerange()"
            raise OSError(errno.EBADF, closed)
        with suppress(BrokenPipeError):
            for packet in _packets(signing.seal(body, self._key)):
                while packet:
                    # A pipe accepts the whole packet; a file on a full disk may not.
                    packet = packet[os.write(self.fd, packet) :]


def _packets(body: bytes) -> Iterator[bytes]:
    name = os.urandom(8)
    for start in range(0, len(body), _BODY_BYTES):
        yield _HEADER.pack(name, len(body) - start) + body[start : start + _BODY_BYTES]


class EventReceiver:
    """The launcher's end: combines received bytes into whole events.

    An event that can't be read becomes a warning; later events still arrive.

    Args:
        fd: read end of the pipe.
        source: the sender, as named in such a warning: ``"rank 3"``.
        key: key that events are signed with; b"" = they are not signed.
    """

    def __init__(self, fd: int, source: str = "another process", key: bytes = b"") -> None:
        self.fd = fd
        self._source = source
        self._key = key
        self._pending = bytearray()
        self._begun: dict[bytes, bytearray] = {}  # id of an event -> its bytes so far
        os.set_blocking(fd, False)

    def receive(self, max_bytes: int = sys.maxsize) -> tuple[list[Event], bool]:
        """Return all events that are complete, and whether all senders have closed their ends.

        Args:
            max_bytes: maximum number of bytes to read.
        """
        is_closed = False
        while max_bytes > 0:
            try:
                chunk = os.read(self.fd, min(_READ_BYTES, max_bytes))
            except BlockingIOError:
                break
            if not chunk:
                is_closed = True
                break
            self._pending += chunk
            max_bytes -= len(chunk)
        return self._parse(), is_closed

    def _parse(self) -> list[Event]:
        events: list[Event] = []
        start = 0
        while len(self._pending) - start >= _HEADER.size:
            name, missing = _HEADER.unpack_from(self._pending, start)
            body_at = start + _HEADER.size
            if not missing:  # zeros, which may be at the end of a file after a power failure
                start = body_at
                continue
            end = body_at + min(missing, _BODY_BYTES)
            if len(self._pending) < end:
                break
            self._begun.setdefault(name, bytearray()).extend(self._pending[body_at:end])
            if end - body_at == missing:
                events.append(self._read(self._begun.pop(name)))
            start = end
        del self._pending[:start]
        return events

    def _read(self, body: bytearray) -> Event:
        try:
            event = pickle.loads(signing.unseal(bytes(body), self._key))
            if not isinstance(event, Event):
                raise TypeError(f"{type(event).__name__} is not an event")
        except Exception as error:  # a detached job may use another release
            why = f"{type(error).__name__}: {error}"
            return Note.of_job(f"an event of {self._source} could not be read and is lost: {why}", "warning")
        return event

    def close(self) -> None:
        """Close the read end."""
        os.close(self.fd)


_OURS = ("nblaunch.", "builtins")
_MAX_TEXT = 10_000
"""Maximum length, in characters, of the ``repr`` that replaces an object."""


def plain(value: Any) -> Any:
    """Return ``value`` as one of Python's own types, even if the code of its class raises an error.

    Numbers and strings of derived classes become values of Python's own classes; enum members become their values.
    Tensors and arrays without dimensions become numbers. Mappings become dicts; lists, tuples and sets become lists.
    All other objects are replaced by their ``repr``.

    Raises:
        RecursionError: the value contains itself.
    """
    try:
        return _plain(value)
    except RecursionError:
        raise
    except Exception as error:  # raised by the user's class
        return f"<{type(value).__name__}, which has no text: {type(error).__name__}>"


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    # Use the base classes' own methods, which derived classes can't override.
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, (bytes, bytearray)):
        return bytes(memoryview(value))
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        number = value.item()
        return number if type(number) in (bool, int, float, str) else str(number)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (list, tuple, Set)):
        return list(value)
    return f"{value!r:.{_MAX_TEXT}}"


def dump_plain(message: Any) -> bytes:
    """Pickle a message in the same way as events: the pickle names only classes of nblaunch and of ``builtins``.

    Raises:
        RecursionError: an object of another class contains itself.
    """
    stream = io.BytesIO()
    _Pickler(stream, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
    return stream.getvalue()


def plain_copy(message: Any) -> Any:
    """Return a copy of a message as the other process would receive it."""
    return pickle.loads(dump_plain(message))


class _Pickler(pickle.Pickler):
    """Pickles objects in the form that :func:`plain` returns, unless they belong to nblaunch or Python itself."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, BuiltinFunctionType)):
            is_ours = str(obj.__module__).startswith(_OURS)
        else:
            is_ours = type(obj).__module__.startswith(_OURS) and not isinstance(obj, BaseException)
        if is_ours:
            return NotImplemented
        made = plain(obj)
        return type(made), (made,)
