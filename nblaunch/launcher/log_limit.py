r"""The limit of a rank's log file: one that outgrows it keeps its beginning and its end, and loses its middle.

The rank and all that it has started write to one open file of their own, so the launcher can neither rename it nor cut
off its beginning without losing what is written meanwhile. It frees the blocks in the middle instead (a hole, see
``fallocate(2)``): positions stay as they are, writers notice nothing, and the newest output is never touched.

    beginning | "... 312 MB were dropped here ..." | hole | end, still growing
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from nblaunch import formatting
from nblaunch.host import disk

_BLOCK = 1 << 16  # bytes; a multiple of every file system's blocks, so that whole blocks are freed
_READ_BYTES = 1 << 30  # at most in one part: read(2) ends at 2 GiB
_NOTICE_BYTES = 160


class LogLimit:
    """Keeps one log file within its limit.

    Args:
        fd: of the file, open for reading and writing, not for appending.
        max_bytes: that it may take on disk; at least four blocks of 64 KiB.
    """

    def __init__(self, fd: int, max_bytes: int) -> None:
        self._fd = fd
        self._max_bytes = max_bytes
        self._head = max_bytes // 4 // _BLOCK * _BLOCK
        self._gap_end = self._head

    def apply(self) -> int:
        """Free the middle of the file if it is too large now; return where its end begins, 0 if nothing was freed.

        Raises:
            OSError: the file system can't free a part of a file.
        """
        size = os.fstat(self._fd).st_size
        if self._head + size - self._gap_end <= self._max_bytes:
            return 0
        end = (size - self._max_bytes // 2) // _BLOCK * _BLOCK
        disk.free_range(self._fd, self._gap_end, end - self._gap_end)
        self._gap_end = end
        os.pwrite(self._fd, self._notice(), self._head - _NOTICE_BYTES)
        return end

    def _notice(self) -> bytes:
        text = (
            f"\n... {formatting.size(self._gap_end - self._head)} of output were dropped here: this log has outgrown "
            f"{formatting.size(self._max_bytes)} (NBLAUNCH_LOG_LIMIT_MB) ..."
        )
        return text.ljust(_NOTICE_BYTES - 1).encode() + b"\n"


def kept_parts(fd: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Return where a file has contents between two positions, as ``(from, to)`` of 1 GiB at most each."""
    while start < end:
        try:
            start = os.lseek(fd, start, os.SEEK_DATA)
            stop = os.lseek(fd, start, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return  # nothing but a hole up to the end of the file
            stop = end  # the file system knows no holes
        if start < end:
            stop = min(stop, end, start + _READ_BYTES)
            yield start, stop
            start = stop
