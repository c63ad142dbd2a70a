"""Parts of memory files: appended at aligned offsets, and read in place or as copies."""

from __future__ import annotations

import mmap
import os
from typing import Any

ALIGN = 64
_SMALL_BYTES = 4096
_MIN_PAGES_BYTES = 1 << 20
_MAX_WRITE_BYTES = 1 << 30  # Linux writes at most 2 GiB - 4 KiB at a time


def aligned(offset: int) -> int:
    """Return the next aligned offset."""
    return -(-offset // ALIGN) * ALIGN


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
    """Drops all data, to test whether a value can be pickled, and to count the bytes."""

    def __init__(self) -> None:
        super().__init__(-1)

    def write(self, data: Any) -> int:
        """Count bytes; return the offset that they would have."""
        start = aligned(self.end)
        self.end = start + memoryview(data).nbytes
        return start
