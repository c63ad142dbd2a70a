"""Files that the kernel has open for writing when it forks workers. No output is lost or written twice.

    kernel ── WrittenFiles.of_this_process: finds Python's file objects and flushes them
      └── fork ──> worker ── drop_c_buffers: drops copied C buffers, which the kernel flushes
                              ├── watch: detects writes of this rank
                              └── flush: flushes this rank's buffers

Ranks that write to one file share its position, so no rank overwrites another's output. But if one rank writes in
pieces, another may write in between. In a file that is also open for reading, each rank has its own position
(``positions.py``), so ranks do overwrite each other. A warning names the file as soon as a second rank writes
to it. Writing to a file that the kernel keeps partly in memory raises an error (``unfinished_files.py``).
"""

from __future__ import annotations

import io
import mmap
import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from nblaunch import formatting
from nblaunch.host import heap
from nblaunch.wire.locks import WorkerLocks
from nblaunch.worker import output
from nblaunch.worker.inheritance import unfinished_files
from nblaunch.worker.inheritance.positions import OpenFile
from nblaunch.worker.inheritance.unfinished_files import UnfinishedFileError

Report = Callable[[str], None]
"""Receives a sentence about a file that several ranks write to."""

_KINDS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.FileIO)
"""Classes of Python's file objects, outermost first."""
_SQLITE = b"SQLite format 3\0"  # source: https://www.sqlite.org/fileformat.html, 1.3

_TORN = (
    "{ranks} write to {name}, which a cell opened, so their output can mix. Open a file per rank inside the "
    "function, or write on one rank"
)
_OVERWRITTEN = (
    "{ranks} write to {name}, which a cell opened for reading and writing. Each rank writes at its own position "
    "and may overwrite the output of another rank. Open a file per rank inside the function, or write on one rank"
)


class WrittenFiles:
    """The kernel's files that are open for writing.

    Args:
        files: descriptor -> file.
        objects: descriptor -> Python's file objects, the outermost first, the raw one last.
        ranks: ranks that are forked.
        channels: descriptors of pipes and terminals that are open for writing.
        plain: descriptors of files other than SQLite databases, which processes may share.
    """

    def __init__(
        self,
        files: Mapping[int, OpenFile],
        objects: Mapping[int, Sequence[Any]],
        ranks: range,
        channels: Collection[int] = (),
        plain: Collection[int] = (),
    ) -> None:
        self._files = files
        self._plain = plain
        self._report: Report = lambda text: None
        self._objects = objects
        self._channels = channels
        self.ranks = ranks
        # Memory that the workers share: for each file, which ranks have written, and whether that was reported.
        self._marks = mmap.mmap(-1, len(objects) * (len(ranks) + 1)) if objects else None

    @property
    def has_objects(self) -> bool:
        """Whether Python has file objects for them."""
        return bool(self._objects)

    @classmethod
    def of_this_process(
        cls, files: Collection[OpenFile], ranks: range, channels: Collection[int] = ()
    ) -> WrittenFiles:
        """Find the file objects of ``files`` in this process and flush them."""
        written = {fd: file for file in files if file.can_be_written for fd in file.fds}
        # IPython's history is a database that every kernel keeps open.
        plain = {fd for fd in written if not _is_database(fd)}
        objects = _file_objects(plain)
        # If a file object can't be flushed now, a worker's copy of it still holds the kernel's lines.
        writable = {fd: of_file for fd, of_file in objects.items() if not any(map(_flush, of_file))}
        return cls(written, writable, ranks, channels, plain)

    def drop_c_buffers(self) -> None:
        """Drop a worker's copies of C buffers."""
        fds = set(self._plain) - self._objects.keys()
        _drop_c_buffers([*(fd for fd in fds if self._files[fd].is_open), *self._channels])

    def watch(self, rank: int, locks: WorkerLocks, report: Report) -> None:
        """Detect a worker's writes; raise an error if the kernel holds a part of the file in memory."""
        self._report = report
        unfinished_files.reject_writes(self._plain)
        for of_file in self._objects.values():
            unfinished_files.hold_back_text(of_file)
        for index, (fd, of_file) in enumerate(self._objects.items()):
            raw = of_file[-1]
            note = partial(self._note_writer, index, rank, locks)
            raw.write = partial(_write, raw, raw.write, self._files[fd], note, report)

    def flush(self) -> None:
        """Flush this process's buffers."""
        for of_file in self._objects.values():
            for file in of_file:
                error = _flush(file)
                if isinstance(error, UnfinishedFileError):
                    self._report(str(error))

    def _note_writer(self, index: int, rank: int, locks: WorkerLocks) -> list[int]:
        """Record that ``rank`` writes to a file; return all ranks that do so if this must be reported, else []."""
        assert self._marks is not None
        last = len(self.ranks)
        marks = memoryview(self._marks)[index * (last + 1) : (index + 1) * (last + 1)]
        with locks.moment():
            marks[rank - self.ranks.start] = 1
            ranks = [other for other in self.ranks if marks[other - self.ranks.start]]
            if len(ranks) < 2 or marks[last]:
                return []
            marks[last] = 1
            return ranks


def _write(
    raw: Any,
    write: Callable[[Any], Any],
    file: OpenFile,
    note_writer: Callable[[], list[int]],
    report: Report,
    data: Any,
) -> Any:
    """Stand in for ``raw.write`` up to the first write that may damage another rank's output."""
    has_own_position = file.can_be_read and not file.flags & os.O_APPEND
    if has_own_position or bytes(memoryview(data).cast("B")[-1:]) != b"\n":  # whole lines stay whole
        vars(raw).pop("write", None)
        if ranks := note_writer():
            text = _OVERWRITTEN if has_own_position else _TORN
            report(text.format(ranks=formatting.ranks(ranks), name=file.name))
    return write(data)


_last_look: tuple[dict[int, list[weakref.ref[Any]]], set[tuple[int, ...]]] = ({}, set())
"""Descriptor -> file objects, and the identities of files that C code has opened. A scan of all objects of a kernel
takes 20 ms and is not repeated for the same files.
"""


def _file_objects(fds: Collection[int]) -> dict[int, list[Any]]:
    """Return the file objects of this process that Python has opened, outermost first, by descriptor."""
    global _last_look
    logs = _logs_of_parent()
    identities = {fd: identity for fd in fds if (identity := _identity(fd, logs)) is not None}
    objects = {fd: _seen_before(fd, identity) for fd, identity in identities.items()}
    if None in objects.values():
        objects = {fd: [] for fd in identities}
        for file in _all_file_objects():
            if (of_file := objects.get(_number(file))) is not None:
                of_file.append(file)
        complete = {
            fd: of_file for fd, of_file in objects.items() if of_file and type(of_file[-1]) is io.FileIO
        }
        _last_look = (
            {fd: [weakref.ref(file) for file in of_file] for fd, of_file in complete.items()},
            {identity for fd, identity in identities.items() if fd not in complete},
        )
        return complete
    return {fd: of_file for fd, of_file in objects.items() if of_file}


def _seen_before(fd: int, identity: tuple[int, ...]) -> list[Any] | None:
    """Return the file objects of the last scan; None if they may not belong to this file."""
    objects, opened_by_c = _last_look
    if identity in opened_by_c:
        return []
    files = [reference() for reference in objects.get(fd, ())]
    return files if files and all(_number(file) == fd for file in files) else None


def _identity(fd: int, logs: Collection[tuple[int, int]]) -> tuple[int, ...] | None:
    """Return what distinguishes a file from a later one with the same descriptor or inode.

    None if a thread, such as IPython's history thread, has closed the file in the meantime.
    """
    try:
        status = os.fstat(fd)
    except OSError:
        return None
    inode = status.st_dev, status.st_ino
    return (fd, *inode) if inode in logs else (fd, *inode, status.st_size, status.st_mtime_ns)


def _logs_of_parent() -> set[tuple[int, int]]:
    """Return the device and inode of the files that receive the output of the parent process, such as a notebook
    server. The kernel has copies of their descriptors. The files grow between launches, but no cell opens them.
    """
    logs = set()
    for fd in (1, 2):
        with suppress(OSError):  # no /proc, or another user's process
            status = os.stat(f"/proc/{os.getppid()}/fd/{fd}")
            logs.add((status.st_dev, status.st_ino))
    return logs


def _is_database(fd: int) -> bool:
    """Return whether ``fd`` is an SQLite database."""
    try:
        return os.pread(fd, len(_SQLITE), 0) == _SQLITE
    except OSError:  # the file is open only for writing
        return False


def _all_file_objects() -> list[Any]:
    """Return the file objects of this process, outermost first. Derived classes are left out, because they run
    their own code.
    """
    files = [item for item in heap.all_objects() if type(item) in _KINDS]
    return sorted(files, key=lambda file: _KINDS.index(type(file)))


def _number(file: Any) -> int:
    """Return the descriptor of a file object; -1 if it no longer has one."""
    try:
        number: int = file.fileno()
    except Exception:  # closed, detached, or a wrapper of a user's object
        return -1
    return number


def _flush(file: Any) -> Exception | None:
    """Flush ``file``; return the error that left data in its buffer."""
    try:
        file.flush()
    except Exception as error:  # for example a full disk, or the function has closed the file
        return error
    return None


def _drop_c_buffers(fds: Collection[int]) -> None:
    """Drop the buffers of the kernel's C streams for ``fds``, because the kernel flushes them."""
    if not fds:
        return
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    kept = []
    try:
        for fd in fds:
            with suppress(OSError):  # a thread of the kernel has closed it before the fork
                kept.append((fd, os.dup(fd), os.get_inheritable(fd)))
                os.dup2(null, fd, inheritable=False)
        output.flush_c_streams()
    finally:
        for fd, copy, inheritable in kept:
            with suppress(OSError):  # replacing it also failed: Valgrind reserves descriptors for itself
                os.dup2(copy, fd, inheritable=inheritable)
            os.close(copy)
        os.close(null)
