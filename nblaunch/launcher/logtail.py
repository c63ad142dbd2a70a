"""Reads the workers' log files while they grow or afterwards, and limits their size.

If a file exceeds its limit, its end is kept. The rank and its children write to one open file, so the launcher can
neither rename nor truncate it without losing output. Instead, it frees the blocks at the beginning (a hole, see
``fallocate(2)``): positions do not change, writers are not affected, and the newest output is never touched.

If a log of a detached job is removed while its rank is writing to it, the launcher restores it within a second, with
all of its output.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from nblaunch import formatting
from nblaunch.events import Event, LogLines, Note, StatusLine
from nblaunch.host import descriptors, exhaustion, files

_READ_BYTES = 1 << 20
_MAX_BYTES_A_TICK = 4 << 20
_MAX_STATUS_BYTES = 4096
_MAX_LINE_BYTES = 1 << 16
_BLOCK_BYTES = 1 << 16
"""A multiple of every file system's block size, so that whole blocks are freed."""

_CHECK_S = 1.0
"""Seconds between checks that the file still has its name."""

Opener = Callable[[str, int], int]
"""Opens a path with flags, like ``opener`` of :func:`open`."""

# Gloo's "Rank N is connected" line. torch 2.8 and 2.9 print it once per group, and no setting silences it. nblaunch
# hides the line unless peers are missing; the log files keep it.
_ALL_CONNECTED = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to (\d+) peer ranks\. Expected number of connected peer ranks is : \1\r?"
)


class LogTail:
    r"""Follows a rank's log file, turns new output into events, and limits the file's size.

    Complete lines become events. The text after the last ``\r`` (a progress bar that redraws itself), or an incomplete
    line, is the rank's status. In a complete line, only the text after its last ``\r`` counts, as on a screen. At most
    64 KiB of an incomplete line are held, to limit memory and time.

    Args:
        rank: rank that writes the log.
        path: path of the file, which need not exist yet.
        max_bytes: limit on the file's size on disk; None = no limit, or one that another process enforces.
        opener: opens the file; None = open it by its path.
        keeps_file: restore the file if it is removed while its rank is writing to it.

    Attributes:
        is_behind: whether the last call to :meth:`read` may have left output unread.
    """

    def __init__(
        self,
        rank: int,
        path: Path,
        max_bytes: int | None = None,
        opener: Opener | None = None,
        keeps_file: bool = False,
    ) -> None:
        self._rank = rank
        self._path = path
        self._max_bytes = max_bytes
        self._opener = opener or os.open
        self._keeps_file = keeps_file
        self._copy_fd = -1  # copy of a removed file
        self._next_check_s = 0.0
        self._kept_from = 0
        self.is_behind = True
        self._fd = -1
        self._line = _Line()
        self._status = ""
        if keeps_file:  # before another process can remove it
            self._is_open()

    def read(self, max_bytes: int = _MAX_BYTES_A_TICK) -> list[Event]:
        """Return events for at most ``max_bytes`` of the output since the last call."""
        events = self._keep_within_limit()
        self._restore()
        self.is_behind = True
        while self.is_behind and max_bytes > 0:
            chunk = self._take(max_bytes)
            self.is_behind = len(chunk) == min(_READ_BYTES, max_bytes)
            max_bytes -= len(chunk)
            if chunk:
                events += self._split(chunk)
        return [*events, *self._changed_status()]

    def read_rest(self) -> Iterator[Event]:
        """Yield events for the rest of the file, including an incomplete last line, in portions that fit in memory."""
        yield from self._keep_within_limit()
        self._next_check_s = 0.0
        self._restore()
        while chunk := self._take(_READ_BYTES):
            yield from self._split(chunk)
            yield from self._keep_within_limit()
        rest = self._line.end()
        if rest:
            yield LogLines(rank=self._rank, lines=(rest,))

    def close(self) -> None:
        """Close the file."""
        descriptors.close(*(fd for fd in (self._fd, self._copy_fd) if fd >= 0))
        self._fd = self._copy_fd = -1

    @property
    def position(self) -> int:
        """Number of bytes read so far."""
        return os.lseek(self._fd, 0, os.SEEK_CUR) if self._fd >= 0 else 0

    def follow_restored(self) -> None:
        """Continue in the launcher's replacement for a removed file; both files begin with the same bytes."""
        if self._fd < 0 or os.fstat(self._fd).st_nlink:
            return
        position = self.position
        with suppress(OSError):  # it does not exist yet
            fd = self._opener(str(self._path), os.O_RDONLY | os.O_CLOEXEC)
            os.lseek(fd, position, os.SEEK_SET)
            descriptors.close(self._fd)
            self._fd = fd
            descriptors.keep_from_children(fd)

    def _take(self, max_bytes: int) -> bytes:
        """Return the next unread bytes; empty at the end of the file."""
        if not self._is_open():
            return b""
        if self._max_bytes is None:  # otherwise, only this object makes holes, and it skips them itself
            _skip_hole(self._fd)
        chunk = os.read(self._fd, min(_READ_BYTES, max_bytes))
        if self._copy_fd >= 0 and chunk:
            with suppress(OSError):  # the disk is full
                os.pwrite(self._copy_fd, chunk, self.position - len(chunk))
        return chunk

    def _restore(self) -> None:
        """Restore a removed file up to the read position; the rest follows as it is read."""
        now_s = time.monotonic()
        if not self._keeps_file or self._fd < 0 or now_s < self._next_check_s:
            return
        self._next_check_s = now_s + _CHECK_S
        current = self._fd if self._copy_fd < 0 else self._copy_fd
        if os.fstat(current).st_nlink:
            return
        try:
            files.make_private_folder(self._path.parent)
            with open(self._path, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                at, end = self._kept_from, self.position
                while at < end and (chunk := os.pread(self._fd, min(_READ_BYTES, end - at), at)):
                    at += os.pwrite(file.fileno(), chunk, at)
                copy_fd = os.dup(file.fileno())
        except FileExistsError:
            return  # another process created it
        except OSError:  # retried at the next check
            with suppress(OSError):
                self._path.unlink()
            return
        if self._copy_fd >= 0:
            descriptors.close(self._copy_fd)
        self._copy_fd = copy_fd
        descriptors.keep_from_children(copy_fd)

    def _is_open(self) -> bool:
        if self._fd < 0:
            try:
                flags = (os.O_RDWR if self._max_bytes else os.O_RDONLY) | os.O_CLOEXEC
                self._fd = self._opener(str(self._path), flags)
                descriptors.keep_from_children(self._fd)
            except FileNotFoundError:
                return False  # the worker has not created it yet
            except OSError as error:
                if not exhaustion.is_exhausted(error):
                    raise
                return False  # this process currently has no descriptor left
        return True

    def _keep_within_limit(self) -> list[Event]:
        """Drop the beginning of a file that has become too large; skip dropped parts that were not read."""
        if self._max_bytes is None or not self._is_open():
            return []
        size = os.fstat(self._fd).st_size
        if size - self._kept_from <= self._max_bytes:
            return []
        kept_from = (size - self._max_bytes // 2) // _BLOCK_BYTES * _BLOCK_BYTES
        try:
            for fd in filter(lambda fd: fd >= 0, (self._fd, self._copy_fd)):
                files.free_range(fd, 0, kept_from)
        except OSError as error:
            self._max_bytes = None
            return [self._outgrown(f"its file system can't free part of it ({error.strerror})")]
        events: list[Event] = [] if self._kept_from else [self._outgrown("its end is kept")]
        self._kept_from = kept_from
        unread = kept_from - os.lseek(self._fd, 0, os.SEEK_CUR)
        if unread > 0:
            os.lseek(self._fd, kept_from, os.SEEK_SET)
            gap = f"... {formatting.size(unread)} of output dropped: printed too fast ..."
            texts = (self._line.end(), gap)
            events.append(LogLines(rank=self._rank, lines=tuple(filter(None, texts))))
        return events

    def _outgrown(self, consequence: str) -> Note:
        text = f"the log {self._path} is larger than NBLAUNCH_LOG_LIMIT_MB: {consequence}"
        return Note(rank=self._rank, text=text, kind="warning")

    def _split(self, chunk: bytes) -> list[Event]:
        first, *others = chunk.split(b"\n")
        self._line.add(first)
        if not others:
            return []
        *whole, rest = others
        is_shown = not _is_connection_notice(self._line.text)
        texts = [self._line.end()] if is_shown else []
        self._line = _Line(rest)
        texts += [_shortened(line) for line in whole if not _is_connection_notice(line)]
        return [LogLines(rank=self._rank, lines=tuple(texts))] if texts else []

    def _changed_status(self) -> list[Event]:
        status = _on_screen(self._line.text[-_MAX_STATUS_BYTES:])
        if status == self._status:
            return []
        self._status = status
        return [StatusLine(rank=self._rank, text=status)]


class _Line:
    """A line in progress, as a terminal would show it: text before a carriage return is dropped.

    Args:
        data: beginning of the line.
    """

    def __init__(self, data: bytes = b"") -> None:
        self.text = b""
        self._num_cut = 0
        self._has_returned = False
        self.add(data)

    def add(self, data: bytes) -> None:
        """Append ``data``, which contains no newline."""
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
        """Return the line as text, and begin the next line."""
        text = _on_screen(self.text)
        if self._num_cut:
            text += f" ... and {formatting.size(self._num_cut)} more in this line; the log has the whole line"
        self.text, self._num_cut, self._has_returned = b"", 0, False
        return text


def _is_connection_notice(line: bytes) -> bool:
    return line.startswith(b"[Gloo]") and _ALL_CONNECTED.fullmatch(line) is not None


def _shortened(line: bytes) -> str:
    return _on_screen(line) if len(line) <= _MAX_LINE_BYTES else _Line(line).end()


def _on_screen(line: bytes) -> str:
    """Return a line as a terminal shows it: the text after its last carriage return, without control sequences."""
    text = line.rstrip(b"\r").rpartition(b"\r")[2].decode("utf-8", errors="replace")
    return text.replace("\x1b[A", "").rstrip()


def read_log(path: Path, max_bytes: int | None = None, opener: Opener | None = None) -> str:
    """Return a rank's log, or only its end, as a terminal shows it; empty if the rank has printed nothing.

    If its beginning was dropped, the first line says how much is missing.
    """
    try:
        with open(path, "rb", buffering=0, opener=opener) as file:
            kept_from = _skip_hole(file.fileno())
            size = file.seek(0, os.SEEK_END)
            start = kept_from if max_bytes is None else max(kept_from, size - max_bytes)
            file.seek(start)
            data = file.readall()
    except FileNotFoundError:
        return ""
    if start == kept_from > 0:
        data = f"... {formatting.size(kept_from)} of output dropped ...\n".encode() + data
    return "\n".join(_on_screen(line) for line in data.split(b"\n") if not _is_connection_notice(line))


def _skip_hole(fd: int) -> int:
    """Skip a hole in the file, if there is one at the current position; return the new position."""
    with suppress(OSError):  # end of the file
        os.lseek(fd, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_DATA)
    return os.lseek(fd, 0, os.SEEK_CUR)
