"""A channel: sealed, length-prefixed messages over the pipes between the coordinator and a node.

    node         ── mark, Hello (JSON) ──────────> coordinator     before the node has a key
    coordinator  ── Boot (pickle), with the key ──> node           over the engine's channel, which is trusted
    both         ── sealed, numbered pickles of nblaunch's own classes (wire/channel.py) ──

A newline follows each message, because Slurm's ``srun`` forwards whole lines.

A node's message is unpickled only if it is sealed with the job's key and has the expected number. Bytes from other
jobs, replayed messages and output from other programs are rejected. Only :meth:`Channel.wait` and
:meth:`Channel.send_now` block; the node program uses them when it has nothing else to do.
"""

from __future__ import annotations

import os
import pickle
import select
import struct
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from nblaunch.wire import signing
from nblaunch.wire.channel import dump_plain

MARK = b"\n\0nblaunch node 1\0\n"
"""Precedes a node program's first message, because the shell that started the program may print text first."""

_END = b"\n"
_LENGTH = struct.Struct("<Q")
_NUMBER = struct.Struct("<Q")
_READ_BYTES = 1 << 20
_MAX_FRAME_BYTES = 1 << 30
_LOOK_S = 0.5
_FULL_BYTES = 4 << 20
"""While the send queue has at least this many bytes, no parts of large objects are read."""


class ChannelError(Exception):
    """Received data is not from the node program of this job. None of it was unpickled."""


class Channel:
    """One end of a channel. Not thread-safe.

    Args:
        reading_fd: descriptor for incoming bytes.
        writing_fd: descriptor for outgoing bytes.
        side: ``b"c"`` at the coordinator, which ignores data before :data:`MARK`; ``b"n"`` at the node.

    Attributes:
        key: key of the job; messages can be sent and received once it is set.
        is_closed: whether the other end was closed and all of its messages were returned.
        last_s: ``monotonic()`` when bytes last arrived.
    """

    def __init__(self, reading_fd: int, writing_fd: int, side: bytes) -> None:
        self.reading_fd = reading_fd
        self.writing_fd = writing_fd
        self.key = b""
        self.is_closed = False
        self.last_s = time.monotonic()
        self._side, self._other_side = side, b"n" if side == b"c" else b"c"
        self._is_skipping = side == b"c"
        self._arrived = bytearray()
        self._waiting: deque[memoryview] = deque()
        self.backlog = 0  # bytes in the send queue
        self._bulk: Iterator[Any] = iter(())
        self._num_sent = self._num_received = 0
        os.set_blocking(reading_fd, False)
        os.set_blocking(writing_fd, False)

    # --- sending -------------------------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        """Whether the send queue is so long that large parts should wait."""
        return self.backlog >= _FULL_BYTES

    def send(self, *messages: Any) -> None:
        """Append messages under one seal to the send queue; without messages, do nothing."""
        if not messages:
            return
        body = _NUMBER.pack(self._num_sent) + dump_plain(messages)
        self._num_sent += 1
        self.send_raw(signing.digest(self.key, self._side, body) + body)

    def send_bulk(self, messages: Iterator[Any]) -> None:
        """Send messages, each created only when there is room for it. Other messages may overtake them."""
        self._bulk = messages
        self.flush()

    def send_raw(self, body: bytes) -> None:
        """Send bytes without a seal."""
        self._queue(_LENGTH.pack(len(body)))
        self._queue(body)
        self._queue(_END)
        self.flush()

    def send_mark(self) -> None:
        """Send the mark; the other end ignores everything before it."""
        self._queue(MARK)

    def _queue(self, data: bytes) -> None:
        self._waiting.append(memoryview(data))
        self.backlog += len(data)

    def flush(self) -> None:
        """Send as much as possible without blocking. If the other end was closed, drop everything."""
        while True:
            if not self._waiting:
                for message in self._bulk:
                    self.send(message)
                    return  # send() has flushed the queue
                return
            view = self._waiting[0]
            try:
                count = os.write(self.writing_fd, view)
            except BlockingIOError:
                return
            except OSError:  # the end of file follows and gives the reason
                self._waiting.clear()
                self.backlog = 0
                self._bulk = iter(())
                return
            self.backlog -= count
            if count == len(view):
                self._waiting.popleft()
            else:
                self._waiting[0] = view[count:]

    @property
    def wants_to_write(self) -> bool:
        """Whether the send queue is not empty."""
        return bool(self._waiting)

    def send_now(self, timeout_s: float | None = None) -> None:
        """Wait until everything is sent, the other end is closed, or ``timeout_s`` seconds have passed."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        poller = select.poll()
        poller.register(self.writing_fd, select.POLLOUT)
        self.flush()
        while self._waiting and (deadline is None or time.monotonic() < deadline):
            poller.poll(100)
            self.flush()

    # --- receiving -----------------------------------------------------------------------------------------------

    def receive(self) -> list[Any]:
        """Return the messages that have arrived.

        Raises:
            ChannelError: a message lacks the seal of this job.
        """
        return [message for body in self.receive_raw() for message in self._load(body)]

    def receive_raw(self, limit: int | None = None) -> list[bytes]:
        """Return the bytes of up to ``limit`` messages that have arrived."""
        while not self.is_closed:
            try:
                chunk = os.read(self.reading_fd, _READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                chunk = b""
            if not chunk:
                self.is_closed = True
                break
            self.last_s = time.monotonic()
            self._arrived += chunk
            if len(self._arrived) >= 2 * _READ_BYTES:  # the rest on the next call
                break
        return self._frames(limit)

    def _frames(self, limit: int | None) -> list[bytes]:
        if self._is_skipping and not self._skip():
            return []
        frames: list[bytes] = []
        start = 0
        while len(self._arrived) - start >= _LENGTH.size and (limit is None or len(frames) < limit):
            (length,) = _LENGTH.unpack_from(self._arrived, start)
            if length > _MAX_FRAME_BYTES:
                raise ChannelError(f"a message of {length} bytes exceeds the limit of {_MAX_FRAME_BYTES}")
            end = start + _LENGTH.size + length
            if len(self._arrived) < end + len(_END):
                break
            frames.append(bytes(memoryview(self._arrived)[start + _LENGTH.size : end]))
            start = end + len(_END)
        del self._arrived[:start]
        return frames

    def _skip(self) -> bool:
        """Drop data before the mark; return whether the mark has arrived."""
        at = self._arrived.find(MARK)
        if at < 0:
            del self._arrived[: max(0, len(self._arrived) - 2 * len(MARK))]
            return False
        del self._arrived[: at + len(MARK)]
        self._is_skipping = False
        return True

    def wait(self) -> list[Any]:
        """Wait for messages and send queued ones; return an empty list if the other end was closed."""
        while not (messages := self.receive()) and not self.is_closed:
            self.flush()
            self.wait_readable()
        return messages

    def wait_readable(self) -> None:
        """Wait briefly for bytes to arrive or for room to send queued bytes."""
        poller = select.poll()
        poller.register(self.reading_fd, select.POLLIN)
        if self._waiting and self.writing_fd != self.reading_fd:
            poller.register(self.writing_fd, select.POLLOUT)
        poller.poll(1000 * _LOOK_S)

    def _load(self, sealed: bytes) -> tuple[Any, ...]:
        body = sealed[signing.SIGNATURE_BYTES :]
        try:
            signing.check(sealed[: signing.SIGNATURE_BYTES], self.key, self._other_side, body)
        except ValueError:
            raise ChannelError(
                "a message arrived that was not signed with this job's key; it was not read"
            ) from None
        (number,) = _NUMBER.unpack_from(body)
        if number != self._num_received:
            raise ChannelError(f"message {number} arrived instead of message {self._num_received}")
        self._num_received += 1
        messages: tuple[Any, ...] = pickle.loads(memoryview(body)[_NUMBER.size :])
        return messages
