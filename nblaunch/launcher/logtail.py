"""The log files of workers: read while they grow or as a whole afterwards, and kept within their limit.

A file that outgrows its limit keeps its beginning and its end, and loses its middle (:class:`LogLimit`).

The rank and all that it has started write to one open file of their own, so the launcher can neither rename it nor cut
off its beginning without losing what is written meanwhile. It frees the blocks in the middle instead (a hole, see
``fallocate(2)``): positions stay as they are, writers notice nothing, and the newest output is never touched.

    beginning | "... 312 MB were dropped here ..." | hole | end, still growing
"""

from __future__ import annotations

import errno
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from nblaunch import formatting
from nblaunch.events import Event, LogLines, Note, StatusLine
from nblaunch.host import disk

_READ_BYTES = 1 << 20
_MAX_BYTES_A_TICK = 4 << 20
_MAX_STATUS_BYTES = 4096
_MAX_LINE_BYTES = 1 << 16

# Gloo's "Rank N is connected" line, which torch 2.8 and 2.9 print per group and no setting silences; hidden, unless
# peers are missing. It stays in the files.
_ALL_CONNECTED = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to (\d+) peer ranks\. Expected number of connected peer ranks is : \1\r?"
)


class LogTail:
    r"""Follows the log file of one rank and turns what is new into events; keeps the file within its limit.

    A line goes out when it is whole. The text after the last ``\r`` (a progress bar redrawing itself), or of a line
    that has not ended, is that rank's status. In a whole line only what follows its last ``\r`` counts, as on a screen.
    Of a line in progress no more than 64 KiB are held, so that memory and time do not depend on what a rank prints.

    Args:
        rank: whose log it is.
        path: of the file; it need not exist yet.
        max_bytes: that it may take on disk; None = without limit.
    """

    def __init__(self, rank: int, path: Path, max_bytes: int | None = None) -> None:
        self._rank = rank
        self._path = path
        self._max_bytes = max_bytes
        self._limit: LogLimit | None = None
        self._has_lost = False
        self._fd = -1
        self._line = _Line()
        self._status = ""

    def read(self, max_bytes: int = _MAX_BYTES_A_TICK) -> list[Event]:
        """Return what is new since the last call, at most ``max_bytes`` of it."""
        events = self._keep_within_limit()
        while max_bytes > 0 and (chunk := self._take(max_bytes)):
            max_bytes -= len(chunk)
            events += self._split(chunk)
        return [*events, *self._changed_status()]

    def read_rest(self) -> Iterator[Event]:
        """Yield everything up to the end of the file with an unfinished last line, in portions that fit into memory."""
        yield from self._keep_within_limit()
        while chunk := self._take(_READ_BYTES):
            yield from self._split(chunk)
            yield from self._keep_within_limit()
        rest = self._line.end()
        if rest:
            yield LogLines(rank=self._rank, time_s=time.time(), lines=(rest,))

    def close(self) -> None:
        """Read no more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _take(self, max_bytes: int) -> bytes:
        """Return bytes that were not read yet; none at the end of the file."""
        if not self._is_open():
            return b""
        max_bytes = min(_READ_BYTES, max_bytes)
        if self._limit is None:  # another process keeps the file within its limit
            at, size = os.lseek(self._fd, 0, os.SEEK_CUR), os.fstat(self._fd).st_size
            start, stop = next(kept_parts(self._fd, at, size), (size, size))
            os.lseek(self._fd, start, os.SEEK_SET)
            max_bytes = min(max_bytes, stop - start)
        return os.read(self._fd, max_bytes)

    def _is_open(self) -> bool:
        if self._fd < 0:
            try:
                self._fd = os.open(self._path, (os.O_RDWR if self._max_bytes else os.O_RDONLY) | os.O_CLOEXEC)
            except FileNotFoundError:
                return False  # the worker has not come so far
            if self._max_bytes:
                self._limit = LogLimit(self._fd, self._max_bytes)
        return True

    def _keep_within_limit(self) -> list[Event]:
        """Drop the middle of a file that has become too large; what is dropped unread is skipped."""
        if not self._is_open() or self._limit is None:
            return []
        try:
            kept_from = self._limit.apply()
        except OSError as error:
            self._limit = None
            return [
                self._warning(
                    f"its file system can't drop a part of a file ({error.strerror}); it goes on growing"
                )
            ]
        if kept_from == 0:
            return []
        events: list[Event] = []
        if not self._has_lost:
            self._has_lost = True
            events.append(
                self._warning("from here on it keeps its beginning and its end and loses what is between")
            )
        unread = kept_from - os.lseek(self._fd, 0, os.SEEK_CUR)
        if unread > 0:
            os.lseek(self._fd, kept_from, os.SEEK_SET)
            texts = (
                self._line.end(),
                f"... {formatting.size(unread)} of output dropped: printed too fast ...",
            )
            events.append(LogLines(rank=self._rank, time_s=time.time(), lines=tuple(filter(None, texts))))
        return events

    def _warning(self, text: str) -> Note:
        size = formatting.size(self._max_bytes or 0)
        text = f"the log {self._path} has outgrown {size} (NBLAUNCH_LOG_LIMIT_MB): {text}"
        return Note(rank=self._rank, time_s=time.time(), text=text, kind="warning")

    def _split(self, chunk: bytes) -> list[Event]:
        first, *others = chunk.split(b"\n")
        self._line.add(first)
        if not others:
            return []
        *whole, rest = others
        is_shown = not _is_idle_talk(self._line.text)
        texts = [self._line.end()] if is_shown else []
        self._line = _Line(rest)
        texts += [_shortened(line) for line in whole if not _is_idle_talk(line)]
        return [LogLines(rank=self._rank, time_s=time.time(), lines=tuple(texts))] if texts else []

    def _changed_status(self) -> list[Event]:
        status = _on_screen(self._line.text[-_MAX_STATUS_BYTES:])
        if status == self._status:
            return []
        self._status = status
        return [StatusLine(rank=self._rank, time_s=time.time(), text=status)]


class _Line:
    """A line in progress, as a terminal would show it: what a carriage return has put aside is forgotten.

    Args:
        data: its beginning.
    """

    def __init__(self, data: bytes = b"") -> None:
        self.text = b""
        self._num_cut = 0
        self._has_returned = False
        self.add(data)

    def add(self, data: bytes) -> None:
        """Go on with ``data``, which has no newline."""
        shown = data.rstrip(b"\r")
        if shown:
            start = shown.rfind(b"\r") + 1
            if start or self._has_returned:
                self.text, self._num_cut = b"", 0
            room = max(0, _MAX_LINE_BYTES - len(self.text))
            self.text += shown[start : start + room]
            self._num_cut += max(0, len(shown) - start - room)
            self._has_returned = False
        self._has_returned |= len(shown) < len(data)

    def end(self) -> str:
        """Return the line as text, and begin the next one."""
        text = _on_screen(self.text)
        if self._num_cut:
            text += f" ... and {formatting.size(self._num_cut)} more in this line; the log has all of it"
        self.text, self._num_cut, self._has_returned = b"", 0, False
        return text


def _is_idle_talk(line: bytes) -> bool:
    return line.startswith(b"[Gloo]") and _ALL_CONNECTED.fullmatch(line) is not None


def _shortened(line: bytes) -> str:
    return _on_screen(line) if len(line) <= _MAX_LINE_BYTES else _Line(line).end()


def _on_screen(line: bytes) -> str:
    """Return what a terminal would show of a line: redrawn from its last carriage return on, no control sequences."""
    text = line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", errors="replace")
    return text.replace("\x1b[A", "").rstrip()


def read_log(path: Path, max_bytes: int | None = None) -> str:
    """Return a rank's log as a terminal shows it, all of it or its end; empty if it never printed.

    Where the log has outgrown its limit, a line in it says how much was dropped.
    """
    try:
        with path.open("rb", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - max_bytes) if max_bytes is not None else 0
            parts = kept_parts(file.fileno(), start, size)
            data = b"".join(os.pread(file.fileno(), to - since, since) for since, to in parts)
    except FileNotFoundError:
        return ""
    return "\n".join(_on_screen(line) for line in data.split(b"\n") if not _is_idle_talk(line))


_BLOCK = 1 << 16  # bytes; a multiple of every file system's blocks, so that whole blocks are freed
_MAX_PART_BYTES = 1 << 30  # at most in one part: read(2) ends at 2 GiB
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
            stop = min(stop, end, start + _MAX_PART_BYTES)
            yield start, stop
            start = stop
