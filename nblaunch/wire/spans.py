"""What each rank spent its time on: spans in a ring of shared memory, and in a file of the job's folder.

    rank 0  SpanWriter ──> ring ┐
    rank 1  SpanWriter ──> ring ├── SpanReader, 10 times a second ──> blocks of a file ──> read_blocks ──> a timeline
    rank N  SpanWriter ──> ring ┘                               └──> causes of slow steps

A span is written when it ends, in a fraction of a microsecond and without a system call. Its serial number is written
last, so that a reader knows which spans are whole. Spans of a rank are of its main thread and lie inside each other or
apart: a backward pass may contain a garbage collection, and an evaluation many waits for data. Times are of the
monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import enum
import struct
import threading
from collections.abc import Iterator, Mapping
from itertools import count
from typing import BinaryIO, NamedTuple

NUM_SPANS = 4096
"""How many spans of a rank wait for the launcher at most; older ones are lost."""

_ENTRY = struct.Struct("<hhf2dq")
SPAN_BYTES = _ENTRY.size
REGION_BYTES = NUM_SPANS * SPAN_BYTES
"""Memory of a rank; the system provides the pages that are written to."""

_WORDS_PER_SPAN = SPAN_BYTES // 8
_BLOCK = struct.Struct("<4sii")  # before the spans of one rank in a file: mark, rank, how many
_MARK = b"spns"
_MAX_DETAIL = 0x7FFF


class SpanKind(enum.IntEnum):
    """What a rank did. Values are stored in files."""

    DATA = 1
    """It waited for a batch. Detail: worker processes of the loader; value: elements of the batch, 0 if not known."""
    BACKWARD = 2
    """It computed gradients, and waited for other ranks in that."""
    OPTIMIZER = 3
    """An optimizer stepped."""
    COLLECTIVE = 4
    """It waited for a collective that Python code called. Detail: position of its name in ``COLLECTIVES``, or -1."""
    SAVE = 5
    """It saved. Value: bytes, 0 if not known."""
    EVALUATION = 6
    """It ran through a loop that trains nothing. Value: batches."""
    GARBAGE = 7
    """Python collected garbage."""


class Span(NamedTuple):
    """One span of a rank, with ``detail`` and ``value`` as :class:`SpanKind` says."""

    kind: int
    detail: int
    value: float
    began_s: float
    ended_s: float
    serial: int


class SpanWriter:
    """The writer's side of a rank's region, for the thread that makes it: spans of others would overlap with its own.

    Args:
        memory: :data:`REGION_BYTES` bytes of the board.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._thread = threading.get_ident()
        self._serials = count(1)
        self._pack = _ENTRY.pack_into

    def detach(self) -> None:
        """Write nothing from now on, in a process that was forked from the rank."""
        self._thread = 0

    def put(
        self, kind: SpanKind, began_s: float, ended_s: float, detail: int = 0, value: float = 0.0
    ) -> None:
        """Record a span that has just ended.

        Args:
            kind: what the rank did.
            began_s: ``monotonic()`` at its begin.
            ended_s: and at its end.
            detail: at most 32,767.
            value: as :class:`SpanKind` says.
        """
        if threading.get_ident() != self._thread:
            return
        serial = next(self._serials)
        self._pack(
            self._memory, serial % NUM_SPANS * SPAN_BYTES,
            kind, detail if detail < _MAX_DETAIL else _MAX_DETAIL, value, began_s, ended_s, serial,
        )  # fmt: skip


class SpanReader:
    """The reader's side of a rank's region.

    Attributes:
        num_lost: spans that were overwritten before they were read.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._words = memory.cast("q")
        self._next = 1
        self.num_lost = 0

    def read(self) -> bytes:
        """Return the spans that were written since the last call, as a file has them."""
        first = self._next
        last = self._last_from(first)
        if last < first:
            return b""
        start, end = first % NUM_SPANS * SPAN_BYTES, last % NUM_SPANS * SPAN_BYTES + SPAN_BYTES
        if start < end:
            data = bytes(self._memory[start:end])
        else:
            data = bytes(self._memory[start:]) + bytes(self._memory[:end])
        self._next = last + 1
        if self._serial_at(first) != first:  # the writer has come round meanwhile
            self.num_lost += last - first + 1
            return b""
        return data

    def _serial_at(self, serial: int) -> int:
        return self._words[serial % NUM_SPANS * _WORDS_PER_SPAN + _WORDS_PER_SPAN - 1]

    def _last_from(self, first: int) -> int:
        """Return the number of the last span; one less than ``first`` if there is none from that on."""
        serial = self._serial_at(first)
        if serial > first:  # it was overwritten: go on with the newest spans
            newest = max(self._words[_WORDS_PER_SPAN - 1 :: _WORDS_PER_SPAN])
            self._next = newest + 1
            self.num_lost += newest - first + 1
            return first - 1
        last = first - 1
        while last - first < NUM_SPANS - 1 and self._serial_at(last + 1) == last + 1:
            last += 1
        return last

    def release(self) -> None:
        """Let go of the memory."""
        self._words.release()
        self._memory.release()


def unpack(data: bytes) -> Iterator[Span]:
    """Yield the spans of what :meth:`SpanReader.read` returned."""
    return map(Span._make, _ENTRY.iter_unpack(data))


def to_blocks(spans: Mapping[int, bytes]) -> bytes:
    """Return the new spans of some ranks (rank -> what :meth:`SpanReader.read` returned), to be added to a file."""
    return b"".join(
        _BLOCK.pack(_MARK, rank, len(data) // SPAN_BYTES) + data for rank, data in spans.items() if data
    )


def read_blocks(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the ranks and spans of a file's blocks; end at a block that is not whole, as while one is written."""
    while len(head := file.read(_BLOCK.size)) == _BLOCK.size:
        mark, rank, number = _BLOCK.unpack(head)
        data = file.read(number * SPAN_BYTES) if mark == _MARK else b""
        if not data or len(data) < number * SPAN_BYTES:
            return
        yield rank, data
