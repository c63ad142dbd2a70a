"""Parts of memory files: appended at aligned offsets, and read in place or as copies. Arrays keep their overlap.

The writer first collects the tensors and NumPy arrays of a value. If two of them span overlapping memory, it writes
this memory once, as one block, and the reader builds both on it. Views therefore stay views, in whatever order they are
added, even if one is a tensor and the other an array. Memory that no array spans is not written, so ten elements of a
large tensor take up the space of ten elements.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_ALIGN = 64
_SMALL_BYTES = 4096
_MIN_PAGES_BYTES = 1 << 20
_MAX_WRITE_BYTES = 1 << 30  # Linux writes at most 2 GiB - 4 KiB at a time


def aligned(offset: int) -> int:
    """Return the next aligned offset."""
    return -(-offset // _ALIGN) * _ALIGN


class MappedFile:
    """Reads parts of a file in place, mapped copy-on-write."""

    def __init__(self, fd: int) -> None:
        self._view = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))

    def part(self, offset: int, size: int) -> Any:
        """Return ``size`` bytes that can be read and written."""
        return self._view[offset : offset + size]


class CopiedFile:
    """Copies parts of a file into memory; arrays that shared memory when they were written share it again."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._parts: dict[tuple[int, int], Any] = {}

    def part(self, offset: int, size: int) -> Any:
        """Return ``size`` bytes that can be read and written."""
        if (offset, size) not in self._parts:
            self._parts[offset, size] = self._copy(offset, size)
        return self._parts[offset, size]

    def _copy(self, offset: int, size: int) -> Any:
        if size < _MIN_PAGES_BYTES:
            whole: Any = bytearray(size)
        else:  # new pages need no zeroing, and return to the system as soon as they are released
            whole = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        rest = memoryview(whole)
        while rest:
            count = os.preadv(self._fd, [rest[:_MAX_WRITE_BYTES]], offset)
            if count == 0:
                raise EOFError(f"the memory file ends at {offset}, before its contents")
            rest, offset = rest[count:], offset + count
        return whole


class FileWriter:
    """Appends raw bytes to a file at aligned offsets, starting at ``end``. It writes small parts together."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.end = 0
        self._pending = bytearray()
        self._pending_at = 0

    def skip(self, num_bytes: int) -> int:
        """Reserve space to be written later; return its offset."""
        start = aligned(self.end)
        self.end = start + num_bytes
        return start

    def write(self, data: Any) -> int:
        """Append bytes; return their offset."""
        view = memoryview(data).cast("B")
        start = aligned(self.end)
        self.end = start + len(view)
        if len(view) < _SMALL_BYTES:
            self._pending_at = self._pending_at if self._pending else start
            self._pending += bytes(start - self._pending_at - len(self._pending))
            self._pending += view
            if len(self._pending) >= _MIN_PAGES_BYTES:
                self.flush()
            return start
        self.flush()
        self._write_at(start, view)
        return start

    def flush(self) -> None:
        """Write buffered parts."""
        pending, self._pending = self._pending, bytearray()
        self._write_at(self._pending_at, memoryview(pending))

    def go_back(self, end: int) -> None:
        """Truncate the file at ``end``."""
        self._pending = bytearray()
        os.ftruncate(self._fd, end)
        self.end = end

    def _write_at(self, offset: int, view: memoryview) -> None:
        while view:
            written = os.pwrite(self._fd, view[:_MAX_WRITE_BYTES], offset)
            view, offset = view[written:], offset + written


class NullWriter(FileWriter):
    """Drops all data; used to test whether a value can be pickled, and to count the bytes."""

    def __init__(self) -> None:
        super().__init__(-1)

    def write(self, data: Any) -> int:
        """Count bytes; return the offset that they would have."""
        start = aligned(self.end)
        self.end = start + memoryview(data).nbytes
        return start


# --- arrays that overlap in memory ------------------------------------------------------------------------------------

_MAX_WASTE = 2
_MAX_WASTE_BYTES = 1 << 16
"""Arrays with gaps between their elements, such as columns of a matrix, are written as one block if the block is at
most this many times as large as their elements, or very small. Otherwise each array is written separately and the
overlap is lost.
"""


class Place(NamedTuple):
    """The place of an array in a file: its block, and its first element in the block.

    The array keeps its strides if its block is shared, or if the block is not laid out in the order of the array's
    indices. Any other block holds the array contiguously, without gaps.
    """

    offset: int
    size: int
    start: int
    is_shared: bool


class Span(NamedTuple):
    """The memory of a non-empty array on the CPU.

    Args:
        address: address of its first element.
        low: lowest address of its elements.
        high: end of its highest element.
        num_bytes: total bytes of its elements.
        item_bytes: bytes of one element.
        is_contiguous: whether its elements are in the order of its indices, without gaps.
    """

    address: int
    low: int
    high: int
    num_bytes: int
    item_bytes: int
    is_contiguous: bool

    @classmethod
    def of(
        cls, address: int, shape: Sequence[int], strides: Sequence[int], item_bytes: int, num_bytes: int
    ) -> Span:
        """Return the memory of an array that is not contiguous; ``strides`` are in bytes."""
        steps = [(size - 1) * step for size, step in zip(shape, strides, strict=True)]
        low = address + sum(step for step in steps if step < 0)
        high = address + sum(step for step in steps if step > 0) + item_bytes
        return cls(address, low, high, num_bytes, item_bytes, False)


class Arrays:
    """The arrays of a value, which are written once all of them are known.

    Args:
        write: appends bytes to the file, and returns their offset.
        written: data of earlier values, which is not written again: key -> offset.
    """

    def __init__(self, write: Callable[[Any], int], written: dict[Any, int]) -> None:
        self._write = write
        self._written = written
        self._spans: dict[int, Span] = {}
        self._copies: dict[int, tuple[Any, Callable[[], Any]]] = {}
        self._places: list[Place] = []

    def add(self, span: Span, key: Any = None, copy: Callable[[], Any] = bytes) -> int:
        """Add an array, whose memory must not change until all arrays are written; return its number.

        Args:
            span: the array's memory.
            key: the same for arrays with the same elements in the same memory; only for an array that is not
                contiguous.
            copy: returns the elements without gaps, as a buffer; only for an array that is not contiguous.
        """
        number = len(self._places)
        self._places.append(_UNKNOWN)
        self._spans[number] = span
        if not span.is_contiguous:
            self._copies[number] = (key, copy)
        return number

    def put_now(self, key: Any, copy: Callable[[], Any], num_bytes: int) -> int:
        """Write an array that is on a device or empty; return its number. The arguments are as in :meth:`add`."""
        if num_bytes and key not in self._written:
            self._written[key] = self._write(copy())
        self._places.append(Place(self._written[key] if num_bytes else 0, num_bytes, 0, False))
        return len(self._places) - 1

    def put(self) -> list[Place]:
        """Write all arrays that have not been written yet; return the places of all arrays, ordered by number."""
        for numbers in self._overlapping():
            spans = [self._spans[number] for number in numbers]
            low, high = spans[0].low, max([span.high for span in spans])
            if len(spans) == 1 and spans[0].is_contiguous:
                self._places[numbers[0]] = Place(self._put_memory(low, high), high - low, 0, False)
            elif _is_one_block(spans, high - low):
                self._put_block(numbers, spans, low, high)
            else:
                for number in numbers:
                    self._places[number] = self._put_copy(number)
        return self._places

    def _overlapping(self) -> list[list[int]]:
        """Return groups of numbers whose spans overlap."""
        groups: list[list[int]] = []
        high = -1
        for number in sorted(self._spans, key=lambda number: self._spans[number].low):
            span = self._spans[number]
            if span.low >= high:
                groups.append([])
            groups[-1].append(number)
            high = max(high, span.high)
        return groups

    def _put_block(self, numbers: Sequence[int], spans: Sequence[Span], low: int, high: int) -> None:
        # Align elements of different sizes to multiples of their sizes, as in memory.
        is_aligned = all((span.address - low) % span.item_bytes == 0 for span in spans)
        pad = 0 if is_aligned else low % _ALIGN
        offset = self._put_memory(low, high, pad)
        for number, span in zip(numbers, spans, strict=True):
            self._places[number] = Place(offset, pad + high - low, pad + span.address - low, True)

    def _put_memory(self, low: int, high: int, pad: int = 0) -> int:
        """Write the bytes between two addresses, after ``pad`` bytes; return the offset of the padding."""
        key = (low, high, pad)
        if key not in self._written:
            raw: Any = (ctypes.c_char * (high - low)).from_address(low)
            self._written[key] = self._write(bytes(pad) + bytes(raw) if pad else raw)
        return self._written[key]

    def _put_copy(self, number: int) -> Place:
        span = self._spans[number]
        if span.is_contiguous:
            return Place(self._put_memory(span.low, span.high), span.num_bytes, 0, False)
        key, copy = self._copies[number]
        if key not in self._written:
            self._written[key] = self._write(copy())
        return Place(self._written[key], span.num_bytes, 0, False)


_UNKNOWN = Place(0, 0, 0, False)


def _is_one_block(spans: Sequence[Span], num_bytes: int) -> bool:
    if len(spans) == 1:
        return spans[0].num_bytes == num_bytes
    element_bytes = sum({(span.address, span.num_bytes): span.num_bytes for span in spans}.values())
    return num_bytes <= max(_MAX_WASTE * element_bytes, _MAX_WASTE_BYTES)
