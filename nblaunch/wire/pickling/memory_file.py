"""Parts of memory files: appended at aligned offsets, and read where they lie or into memory of their own."""

from __future__ import annotations

import mmap
import os
from typing import Any

ALIGN = 64
_SMALL_BYTES = 4096
_MIN_PAGES_BYTES = 1 << 20
_MAX_WRITE_BYTES = 1 << 30  # Linux writes at most 2 GiB - 4 KiB at a time


def aligned(offset: int) -> int:
    """Return the next offset at which something may begin."""
    return -(-offset // ALIGN) * ALIGN


class MappedFile:
    """Parts of a file where they lie, mapped copy-on-write."""

    def __init__(self, fd: int) -> None:
        self._view = memoryview(mmap.mmap(fd, 0, access=mmap.ACCESS_COPY))

    def part(self, offset: int, size: int) -> Any:
        """Return that many bytes, to be read and written."""
        return self._view[offset : offset + size]


class CopiedFile:
    """Parts of a file, each in memory of its own; arrays that shared memory when they were written share it again."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._parts: dict[tuple[int, int], Any] = {}

    def part(self, offset: int, size: int) -> Any:
        """Return that many bytes, to be read and written."""
        if (offset, size) not in self._parts:
            self._parts[offset, size] = self._copy(offset, size)
        return self._parts[offset, size]

    def _copy(self, offset: int, size: int) -> Any:
        if size < _MIN_PAGES_BYTES:
            whole: Any = bytearray(size)
        else:  # these need not be zeroed, and are back with the system as soon as they are given up
            whole = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        rest = memoryview(whole)
        while rest:
            count = os.preadv(self._fd, [rest[:_MAX_WRITE_BYTES]], offset)
            if count == 0:
                raise EOFError(f"the memory file ends at {offset}, before its contents")
            rest, offset = rest[count:], offset + count
        return whole


class FileWriter:
    """Appends raw bytes to a file at aligned offsets, from ``end`` on. Small parts are written together."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.end = 0
        self._pending = bytearray()
        self._pending_at = 0

    def skip(self, num_bytes: int) -> int:
        """Leave room, to be written later; returns where."""
        start = aligned(self.end)
        self.end = start + num_bytes
        return start

    def write(self, data: Any) -> int:
        """Append bytes; return where."""
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
        """Write what is held back."""
        pending, self._pending = self._pending, bytearray()
        self._write_at(self._pending_at, memoryview(pending))

    def go_back(self, end: int) -> None:
        """Give back what lies beyond ``end``."""
        self._pending = bytearray()
        os.ftruncate(self._fd, end)
        self.end = end

    def _write_at(self, offset: int, view: memoryview) -> None:
        while view:
            written = os.pwrite(self._fd, view[:_MAX_WRITE_BYTES], offset)
            view, offset = view[written:], offset + written


class NullWriter(FileWriter):
    """Takes everything and keeps nothing, to try whether a value can be pickled, and in how many bytes."""

    def __init__(self) -> None:
        super().__init__(-1)

    def write(self, data: Any) -> int:
        """Count bytes; return where they would be."""
        start = aligned(self.end)
        self.end = start + memoryview(data).nbytes
        return start
