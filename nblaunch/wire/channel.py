"""Events on their way from one process to another: frames of one length and one pickled event, through a pipe.

    worker ── EventSender ──> pipe ──> EventReceiver ── launcher's wait loop

Workers only send; the launcher answers them with signals alone. With the agent of its node it talks both ways, through
a pipe each (``wire/nodes.py``). The receiving end never blocks, so that one silent worker can't hold up the others.
"""

from __future__ import annotations

import errno
import os
import pickle
import struct
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from nblaunch.events import Event

_LENGTH = struct.Struct("<Q")
_READ_BYTES = 1 << 18
_CLOSED = (
    "the worker's connection to its launcher is closed: code in it closes descriptors that it has not opened "
    "(os.closerange?)"
)


class EventSender:
    """The worker's end. Threads of a worker may share it.

    Args:
        fd: writing end of the pipe.
        uninterrupted: makes a context in which an interrupt is held back, so that no frame is ever cut in two.
    """

    def __init__(
        self, fd: int, uninterrupted: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self.fd = fd
        self._uninterrupted = uninterrupted
        self._lock = threading.Lock()

    def send(self, event: Event) -> None:
        """Write one event whole. A launcher that is gone is no reason to fail: its workers are about to end too.

        Raises:
            RuntimeError: the descriptor was closed in this process.
        """
        body = pickle.dumps(event, protocol=pickle.HIGHEST_PROTOCOL)
        frame = memoryview(_LENGTH.pack(len(body)) + body)
        with self._uninterrupted(), self._lock:
            try:
                while frame:
                    frame = frame[os.write(self.fd, frame) :]
            except BrokenPipeError:
                return
            except OSError as error:
                if error.errno != errno.EBADF:
                    raise
                raise RuntimeError(_CLOSED) from None


class EventReceiver:
    """The launcher's end: turns whatever bytes have arrived into whole events."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._pending = bytearray()
        os.set_blocking(fd, False)

    def receive(self) -> tuple[list[Event], bool]:
        """All events that are complete by now, and whether the other end was closed by everyone."""
        is_closed = False
        while True:
            try:
                chunk = os.read(self.fd, _READ_BYTES)
            except BlockingIOError:
                break
            if not chunk:
                is_closed = True
                break
            self._pending += chunk
        return self._parse(), is_closed

    def _parse(self) -> list[Event]:
        events: list[Event] = []
        start = 0
        while len(self._pending) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pending, start)
            end = start + _LENGTH.size + length
            if len(self._pending) < end:
                break
            events.append(pickle.loads(memoryview(self._pending)[start + _LENGTH.size : end]))
            start = end
        del self._pending[:start]
        return events

    def close(self) -> None:
        """Read no more."""
        os.close(self.fd)
