"""A channel: sealed messages over the pipes between the coordinator and a node, with a length before each.

    node         ── mark, Hello (JSON) ──────────> coordinator     before the node has a key
    coordinator  ── Boot (pickle), with the key ──> node           by the engine's own channel, which it trusts
    both         ── sealed, numbered pickles of nblaunch's own classes (wire/channel.py) ──

A newline follows each message: Slurm's ``srun`` passes on whole lines.

What a node sends is unpickled only under the seal of the job's key, with the number that is due: bytes of another job,
replayed ones and those that something else has written are not read. Nothing blocks but :meth:`Channel.wait` and
:meth:`Channel.send_now`, which the node program uses where it has nothing else to do.
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
"""Begins what a node program sends: a shell that was started for it may have printed before."""

_END = b"\n"
_LENGTH = struct.Struct("<Q")
_NUMBER = struct.Struct("<Q")
_READ_BYTES = 1 << 20
_MAX_FRAME_BYTES = 1 << 30
_LOOK_S = 0.5
_FULL_BYTES = 4 << 20
"""So many bytes wait to be sent at most, before parts of large objects are read."""


class ChannelError(Exception):
    """What has arrived is not from the node program of this job. Nothing of it was unpickled."""


class Channel:
    """One end. Not safe in several threads.

    Args:
        reading_fd: where bytes arrive.
        writing_fd: where bytes go.
        side: ``b"c"`` at the coordinator, ``b"n"`` at the node.
        skips_to_mark: ignore what arrives before :data:`MARK`.

    Attributes:
        key: key of the job; messages can be sent and received once it is set.
        is_closed: the other end was closed, and all that it had sent was returned.
        last_s: ``monotonic()`` when bytes arrived last.
    """

    def __init__(self, reading_fd: int, writing_fd: int, side: bytes, *, skips_to_mark: bool = False) -> None:
        self.reading_fd = reading_fd
        self.writing_fd = writing_fd
        self.key = b""
        self.is_closed = False
        self.last_s = time.monotonic()
        self._side, self._other_side = side, b"n" if side == b"c" else b"c"
        self._is_skipping = skips_to_mark
        self._arrived = bytearray()
        self._waiting: deque[memoryview] = deque()
        self._backlog = 0
        self._bulk: Iterator[Any] = iter(())
        self._num_sent = self._num_received = 0
        os.set_blocking(reading_fd, False)
        os.set_blocking(writing_fd, False)

    # --- sending -------------------------------------------------------------------------------------------------

    @property
    def backlog(self) -> int:
        """Bytes that wait to be sent."""
        return self._backlog

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be sent that large parts should wait, too."""
        return self._backlog >= _FULL_BYTES

    def send(self, message: Any) -> None:
        """Send a message, behind those that wait."""
        body = _NUMBER.pack(self._num_sent) + dump_plain(message)
        self._num_sent += 1
        self.send_raw(signing.digest(self.key, self._side, body) + body)

    def send_bulk(self, messages: Iterator[Any]) -> None:
        """Send messages, each made no earlier than there is room for it. Other messages may overtake them."""
        self._bulk = messages
        self.flush()

    def send_raw(self, body: bytes) -> None:
        """Send bytes without a seal."""
        self._queue(_LENGTH.pack(len(body)))
        self._queue(body)
        self._queue(_END)
        self.flush()

    def send_mark(self) -> None:
        """Send what the other end skips to."""
        self._queue(MARK)

    def _queue(self, data: bytes) -> None:
        self._waiting.append(memoryview(data))
        self._backlog += len(data)

    def flush(self) -> None:
        """Send what can be sent now. Where the other end was closed, everything is dropped."""
        while True:
            if not self._waiting:
                for message in self._bulk:
                    self.send(message)
                    return  # which has flushed
                return
            view = self._waiting[0]
            try:
                count = os.write(self.writing_fd, view)
            except BlockingIOError:
                return
            except OSError:  # the end of the file follows, which says why
                self._waiting.clear()
                self._backlog = 0
                self._bulk = iter(())
                return
            self._backlog -= count
            if count == len(view):
                self._waiting.popleft()
            else:
                self._waiting[0] = view[count:]

    @property
    def wants_to_write(self) -> bool:
        """Whether anything waits to be sent."""
        return bool(self._waiting)

    def send_now(self, timeout_s: float | None = None) -> None:
        """Wait until everything was sent, the other end was closed, or ``timeout_s`` seconds have passed."""
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
            ChannelError: what has arrived has no seal of this job.
        """
        return [self._load(body) for body in self.receive_raw()]

    def receive_raw(self, limit: int | None = None) -> list[bytes]:
        """Return the bytes of what has arrived, ``limit`` messages at most."""
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
            if len(self._arrived) >= 2 * _READ_BYTES:  # the rest at the next call
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
                raise ChannelError(f"a message of {length} bytes is announced")
            end = start + _LENGTH.size + length
            if len(self._arrived) < end + len(_END):
                break
            frames.append(bytes(memoryview(self._arrived)[start + _LENGTH.size : end]))
            start = end + len(_END)
        del self._arrived[:start]
        return frames

    def _skip(self) -> bool:
        """Drop what arrived before the mark; return whether it has arrived."""
        at = self._arrived.find(MARK)
        if at < 0:
            del self._arrived[: max(0, len(self._arrived) - 2 * len(MARK))]
            return False
        del self._arrived[: at + len(MARK)]
        self._is_skipping = False
        return True

    def wait(self, timeout_s: float | None = None) -> list[Any]:
        """Wait for messages; return none where the other end was closed, or the time is over. Sends what waits."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            messages = self.receive()
            if messages or self.is_closed or (deadline is not None and time.monotonic() >= deadline):
                return messages
            self.flush()
            self.wait_readable(_LOOK_S if deadline is None else max(0.0, deadline - time.monotonic()))

    def wait_readable(self, timeout_s: float = _LOOK_S) -> None:
        """Wait until bytes arrive, or those that wait can be sent, ``timeout_s`` seconds at most."""
        poller = select.poll()
        poller.register(self.reading_fd, select.POLLIN)
        if self._waiting and self.writing_fd != self.reading_fd:
            poller.register(self.writing_fd, select.POLLOUT)
        poller.poll(1000 * timeout_s)

    def _load(self, sealed: bytes) -> Any:
        body = sealed[signing.SIGNATURE_BYTES :]
        try:
            signing.check(sealed[: signing.SIGNATURE_BYTES], self.key, self._other_side, body)
        except ValueError:
            raise ChannelError("a message arrived without the seal of this job, and was not read") from None
        (number,) = _NUMBER.unpack_from(body)
        if number != self._num_received:
            raise ChannelError(f"message {number} arrived where {self._num_received} was due")
        self._num_received += 1
        return pickle.loads(memoryview(body)[_NUMBER.size :])
