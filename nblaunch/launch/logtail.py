"""What workers print, read from their log files: followed while they grow, or as a whole afterwards."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

from nblaunch.events import Event, LogLines, StatusLine

_READ_BYTES = 1 << 20
_MAX_BYTES_A_TICK = 4 << 20
_MAX_STATUS_BYTES = 4096

# What gloo says in every rank, for every process group, with torch 2.8 and 2.9, and no setting silences: that all is
# well. It stays in the files. One that says less than all is kept. Can go with the support of these versions.
_ALL_CONNECTED = re.compile(
    rb"\[Gloo\] Rank \d+ is connected to (\d+) peer ranks\. Expected number of connected peer ranks is : \1\r?"
)


class LogTail:
    r"""Follows the log file of one rank and turns what is new into events.

    A line goes out when it is whole. The text after the last ``\r`` (a progress bar redrawing itself), or of a line
    that has not ended, is that rank's status. In a whole line only what follows its last ``\r`` counts, as on a screen.
    """

    def __init__(self, rank: int, path: Path) -> None:
        self._rank = rank
        self._path = path
        self._fd = -1
        self._unfinished = b""
        self._status = ""

    def read(self, max_bytes: int = _MAX_BYTES_A_TICK) -> list[Event]:
        """What is new since the last call, at most ``max_bytes`` of it."""
        data = self._take(max_bytes)
        return self._split(data) if data else []

    def read_rest(self) -> Iterator[Event]:
        """Everything up to the end of the file, an unfinished last line included; as much at a time as memory bears."""
        while data := self._take(_MAX_BYTES_A_TICK):
            yield from self._split(data)
        rest = _on_screen(self._unfinished)
        if rest:
            yield LogLines(rank=self._rank, time_s=time.time(), lines=(rest,))
        self._unfinished = b""

    def close(self) -> None:
        """Read no more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _take(self, max_bytes: int) -> bytes:
        """Bytes that were not read yet; none at the end of the file."""
        if self._fd < 0 and not self._open():
            return b""
        chunks = []
        while max_bytes > 0 and (chunk := os.read(self._fd, min(_READ_BYTES, max_bytes))):
            chunks.append(chunk)
            max_bytes -= len(chunk)
        return b"".join(chunks)

    def _open(self) -> bool:
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False  # the worker has not come so far
        return True

    def _split(self, data: bytes) -> list[Event]:
        *whole, self._unfinished = (self._unfinished + data).split(b"\n")
        events: list[Event] = []
        now = time.time()
        lines = tuple(_on_screen(line) for line in whole if not _is_idle_talk(line))
        if lines:
            events.append(LogLines(rank=self._rank, time_s=now, lines=lines))
        status = _on_screen(self._unfinished[-_MAX_STATUS_BYTES:])
        if status != self._status:
            self._status = status
            events.append(StatusLine(rank=self._rank, time_s=now, text=status))
        return events


def _is_idle_talk(line: bytes) -> bool:
    return line.startswith(b"[Gloo]") and _ALL_CONNECTED.fullmatch(line) is not None


def _on_screen(line: bytes) -> str:
    """What a terminal would show of a line: redrawn from its last carriage return on, without control sequences."""
    text = line.decode("utf-8", errors="replace").rstrip("\r")
    return text.rpartition("\r")[2].replace("\x1b[A", "").rstrip()


def read_log(path: Path, max_bytes: int | None = None) -> str:
    """A rank's log as a person would have seen it, all of it or its end; empty if it never printed."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes) if max_bytes is not None else 0)
            data = file.read()
    except FileNotFoundError:
        return ""
    return "\n".join(_on_screen(line) for line in data.split(b"\n") if not _is_idle_talk(line))
