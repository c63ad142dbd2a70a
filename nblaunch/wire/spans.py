"""Records how each rank spends its time as spans, in a ring of shared memory and in a file in the job's folder.

    rank 0  SpanWriter ──> ring ┐
    rank 1  SpanWriter ──> ring ├── SpanReader, 10 times a second ──> blocks of a file ──> read_blocks ──> a timeline
    rank N  SpanWriter ──> ring ┘                               └──> causes of slow steps

A span is written when it ends, in a fraction of a microsecond and without a system call. Its serial number is written
last, so that a reader recognises complete spans. All spans of a rank come from its main thread, and are either nested
or disjoint: a backward pass may contain a garbage collection, and an evaluation may contain many waits for data. Times
come from the monotonic clock, which all processes on a machine share.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Mapping
from threading import get_ident
from typing import BinaryIO, NamedTuple

NUM_SPANS = 4096
"""Maximum number of a rank's spans that can wait for the launcher; if there are more, the oldest are lost."""

_ENTRY = struct.Struct("<hhf2dq")
_START = struct.Struct("<hhf")
_pack = struct.Struct("@8s2dq").pack_into  # the same entry; the bytes are its start
SPAN_BYTES = _ENTRY.size
REGION_BYTES = NUM_SPANS * SPAN_BYTES
"""Size of a rank's region; the system allocates only the pages that are written to."""

_WORDS_PER_SPAN = SPAN_BYTES // 8
_BLOCK = struct.Struct("<4sii")  # before the spans of one rank in a file: mark, rank, number of spans
_MARK = b"spns"
_MAX_DETAIL = 0x7FFF


class SpanKind(enum.IntEnum):
    """The activity of a rank. Values are stored in files."""

    DATA = 1
    """Wait for a batch. Detail: number of worker processes of the loader; value: number of elements in the batch, 0 if
    unknown.
    """
    BACKWARD = 2
    """Backward pass, including waits for other ranks."""
    OPTIMIZER = 3
    """Optimizer step."""
    COLLECTIVE = 4
    """Wait for a collective that Python code called. Detail: index of its name in ``COLLECTIVES``, or -1."""
    SAVE = 5
    """Save. Value: bytes, 0 if unknown."""
    EVALUATION = 6
    """Loop that does not train. Value: batches."""
    GARBAGE = 7
    """Garbage collection."""


class Span(NamedTuple):
    """One span of a rank; :class:`SpanKind` describes ``detail`` and ``value``."""

    kind: int
    detail: int
    value: float
    began_s: float
    ended_s: float
    serial: int


def start_of(kind: SpanKind, detail: int = 0, value: float = 0.0) -> bytes:
    """Return the first bytes of a span's entry, for :meth:`SpanWriter.write`."""
    return _START.pack(kind, min(detail, _MAX_DETAIL), value)


class SpanWriter:
    """The writer's side of a rank's region, for use only by the thread that creates the writer; spans of other threads
    would overlap.

    Args:
        memory: :data:`REGION_BYTES` bytes of the board.
    """

    __slots__ = ("_memory", "_serial", "_thread")

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._serial = 0
        self._thread = get_ident()

    def detach(self) -> None:
        """Stop writing, in a process that was forked from the rank."""
        self._thread = 0

    def put(
        self, kind: SpanKind, began_s: float, ended_s: float, detail: int = 0, value: float = 0.0
    ) -> None:
        """Record a span that has just ended.

        Args:
            kind: activity of the rank.
            began_s: ``monotonic()`` at the beginning.
            ended_s: ``monotonic()`` at the end.
            detail: at most 32,767.
            value: see :class:`SpanKind`.
        """
        self.write(start_of(kind, detail, value), began_s, ended_s)

    def write(self, start: bytes, began_s: float, ended_s: float) -> None:
        """Record a span that has just ended; use this in code that runs at every step.

        Args:
            start: output of :func:`start_of`, made once.
            began_s: ``monotonic()`` at the beginning.
            ended_s: ``monotonic()`` at the end.
        """
        if get_ident() == self._thread:
            self._serial = serial = self._serial + 1
            _pack(self._memory, serial % NUM_SPANS * SPAN_BYTES, start, began_s, ended_s, serial)


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
        """Return the spans that were written since the last call, in the format of the file."""
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
        if self._serial_at(first) != first:  # the writer has lapped the reader in the meantime
            self.num_lost += last - first + 1
            return b""
        return data

    def _serial_at(self, serial: int) -> int:
        return self._words[serial % NUM_SPANS * _WORDS_PER_SPAN + _WORDS_PER_SPAN - 1]

    def _last_from(self, first: int) -> int:
        """Return the number of the last span; one less than ``first`` if there are no new spans."""
        serial = self._serial_at(first)
        if serial > first:  # overwritten: continue with the newest spans
            newest = max(self._words[_WORDS_PER_SPAN - 1 :: _WORDS_PER_SPAN])
            self._next = newest + 1
            self.num_lost += newest - first + 1
            return first - 1
        last = first - 1
        while last - first < NUM_SPANS - 1 and self._serial_at(last + 1) == last + 1:
            last += 1
        return last

    def release(self) -> None:
        """Release the memory."""
        self._words.release()
        self._memory.release()


def unpack(data: bytes) -> Iterator[Span]:
    """Yield the spans in the output of :meth:`SpanReader.read`."""
    return map(Span._make, _ENTRY.iter_unpack(data))


def to_blocks(spans: Mapping[int, bytes]) -> bytes:
    """Return the new spans of some ranks (rank -> output of :meth:`SpanReader.read`) as blocks for a file."""
    return b"".join(
        _BLOCK.pack(_MARK, rank, len(data) // SPAN_BYTES) + data for rank, data in spans.items() if data
    )


def read_blocks(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the rank and spans of each block in a file; stop at an incomplete block, which may still be being
    written.
    """
    while len(head := file.read(_BLOCK.size)) == _BLOCK.size:
        mark, rank, number = _BLOCK.unpack(head)
        data = file.read(number * SPAN_BYTES) if mark == _MARK else b""
        if not data or len(data) < number * SPAN_BYTES:
            return
        yield rank, data
