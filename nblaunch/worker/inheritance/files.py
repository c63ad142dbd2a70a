"""Files that the kernel has open when it forks workers. Each worker reads them at its own position, and no output is
lost or written twice.

    kernel ── KernelFiles: finds Python's file objects and flushes them, records files and positions
      └── fork ──> worker ── renew: its own position in each readable file (positions.py); drops copied C buffers,
                              │      which the kernel flushes
                              ├── watch: detects ranks that write to the same file
                              └── flush: flushes its buffers

Files open only for writing keep the shared position, because ranks would otherwise overwrite each other. But if one
rank writes in pieces, another may write in between. In a file that is also open for reading, each rank has its own
position, so ranks do overwrite each other. A warning names the file as soon as a second rank writes to it. Writing to
a file that the kernel keeps partly in memory raises an error (``unfinished_files.py``). Pipes, sockets and terminals
can't be reopened, so they stay shared.

A data loader's processes inherit their rank's positions, and get their own positions in the same way.
"""

from __future__ import annotations

import io
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from functools import partial
from typing import Any

from nblaunch import formatting, packages
from nblaunch.host import heap, sockets
from nblaunch.user_code import ipython_shell
from nblaunch.wire.locks import WorkerLocks
from nblaunch.worker import output
from nblaunch.worker.inheritance import positions, unfinished_files
from nblaunch.worker.inheritance.positions import Identity, OpenDescriptors, OpenFile
from nblaunch.worker.inheritance.unfinished_files import UnfinishedFileError

_KINDS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.FileIO)
"""Classes of Python's file objects, outermost first."""
_SQLITE = b"SQLite format 3\0"  # source: https://www.sqlite.org/fileformat.html, 1.3

_MAX_NAMED = 3
_SHARED = (
    "all ranks share one position in {names}, which {are} open in the kernel and can't be reopened. If the "
    "function reads {them}, open {them} inside the function"
)
_TORN = (
    "{ranks} write to {name}, which a cell opened, so their output may be interleaved. Open a file per rank inside the "
    "function, or write on one rank"
)
_OVERWRITTEN = (
    "{ranks} write to {name}, which a cell opened for reading and writing. Each rank writes at its own position "
    "and may overwrite another rank's output. Open a file per rank inside the function, or write on one rank"
)


class KernelFiles:
    """The open files of a process, for the workers that it forks. Creating this object flushes the process's buffers.

    Args:
        ours: nblaunch's descriptors, which are left alone.
        ranks: ranks that will be forked.

    Attributes:
        channels: open pipes, sockets and terminals.
        connections: connections that only the first rank keeps.
    """

    def __init__(self, ours: Collection[int], ranks: range) -> None:
        history = _history()
        # Files of nblaunch and of IPython's history, and files that receive the process's output.
        self._left_out = frozenset(map(positions.identity, {*ours, *_standard_outputs()})) | _identities_of(
            history
        )
        opened = OpenDescriptors.of_this_process(self._left_out)
        files = _without_journals(opened.files, history)
        self._ranks = ranks
        written = {fd: file for file in files if file.can_be_written for fd in file.fds}
        # IPython's history is a database that every kernel keeps open.
        self._written = {fd: file for fd, file in written.items() if not _is_database(fd)}
        objects = file_objects(self._written)
        # If a file object can't be flushed now, a worker's copy of it still holds the kernel's lines.
        self._objects = {fd: of_file for fd, of_file in objects.items() if not any(map(_flush, of_file))}
        # Memory that the workers share: for each file, which ranks have written, and whether that was reported.
        self._marks = mmap.mmap(-1, len(self._objects) * (len(ranks) + 1)) if self._objects else None
        if self._objects:  # flushing them may have moved their positions
            files = _without_journals(OpenDescriptors.of_this_process(self._left_out).files, history)
        self._files = files
        self._shared: list[OpenFile] = []
        self._warn: Callable[[str], None] = lambda text: None
        # Every kernel has sockets, and C code does not buffer what it writes to them.
        self._streams = list(opened.streams)
        self.channels = frozenset((*opened.streams.values(), *opened.sockets.values()))
        self.connections = sockets.connections_to_others(opened.sockets)

    def renew(self) -> None:
        """Take over the files in this worker. Call this first, because a worker closes some of the kernel's files."""
        self._shared = positions.renew(self._files)
        fds = self._written.keys() - self._objects.keys()
        _drop_c_buffers([*(fd for fd in fds if self._written[fd].is_open), *self._streams])

    def watch(self, rank: int, locks: WorkerLocks, warn: Callable[[str], None]) -> None:
        """Detect writes by this worker that may damage files; reject writes to files that the kernel keeps partly in
        memory.

        Args:
            rank: the worker's rank.
            locks: locks that the workers share.
            warn: receives sentences for the user.
        """
        self._warn = warn
        if self._shared and rank == self._ranks.start:
            is_one = len(self._shared) == 1
            names = formatting.first([file.name for file in self._shared], _MAX_NAMED)
            warn(_SHARED.format(names=names, are="is" if is_one else "are", them="it" if is_one else "them"))
        unfinished_files.reject_writes(self._written)
        for of_file in self._objects.values():
            unfinished_files.hold_back_text(of_file)
        for index, (fd, of_file) in enumerate(self._objects.items()):
            raw = of_file[-1]
            note = partial(self._note_writer, index, rank, locks)
            raw.write = partial(_write, raw, raw.write, self._written[fd], note, warn)
        packages.when_imported("torch.utils.data._utils.worker", self._renew_in_loader_processes)

    def flush(self) -> None:
        """Flush this process's buffers: before a fork, and in a worker after the function has returned."""
        for of_file in self._objects.values():
            for file in of_file:
                error = _flush(file)
                if isinstance(error, UnfinishedFileError):
                    self._warn(str(error))

    def _note_writer(self, index: int, rank: int, locks: WorkerLocks) -> list[int]:
        """Record that ``rank`` writes to a file; return all ranks that write to it if a report is due, otherwise []."""
        assert self._marks is not None
        last = len(self._ranks)
        marks = memoryview(self._marks)[index * (last + 1) : (index + 1) * (last + 1)]
        with locks.moment():
            marks[rank - self._ranks.start] = 1
            ranks = [other for other in self._ranks if marks[other - self._ranks.start]]
            if len(ranks) < 2 or marks[last]:
                return []
            marks[last] = 1
            return ranks

    @packages.defines_replacements
    def _renew_in_loader_processes(self, module: Any) -> None:
        loop = module._worker_loop

        # The name stays, because a fresh process looks up the original by name.
        @packages.replaces(module, "_worker_loop")
        def renew_and_loop(*args: Any, **kwargs: Any) -> None:
            positions.renew(OpenDescriptors.of_this_process(self._left_out).files)
            loop(*args, **kwargs)


def _write(
    raw: Any,
    write: Callable[[Any], Any],
    file: OpenFile,
    note_writer: Callable[[], list[int]],
    warn: Callable[[str], None],
    data: Any,
) -> Any:
    """Stand in for ``raw.write`` until the first write that may damage another rank's output."""
    has_own_position = file.can_be_read and not file.flags & os.O_APPEND
    if has_own_position or bytes(memoryview(data).cast("B")[-1:]) != b"\n":  # whole lines stay whole
        vars(raw).pop("write", None)
        if ranks := note_writer():
            text = _OVERWRITTEN if has_own_position else _TORN
            warn(text.format(ranks=formatting.ranks(ranks), name=file.name))
    return write(data)


def _standard_outputs() -> set[int]:
    """Return this process's output descriptors, and ipykernel's copies of these, to which no cell writes directly."""
    fds = {1, 2, *(getattr(stream, "_original_stdstream_copy", None) for stream in (sys.stdout, sys.stderr))}
    return {fd for fd in fds if isinstance(fd, int) and positions.is_open(fd)}


def _history() -> str:
    """Return the path of IPython's history database, which only a kernel thread uses; empty if there is none."""
    path = getattr(getattr(ipython_shell(), "history_manager", None), "hist_file", None)
    return os.path.realpath(path) if isinstance(path, (str, os.PathLike)) else ""


def _identities_of(path: str) -> frozenset[Identity]:
    try:
        status = os.stat(path)
    except OSError:  # the database is in memory
        return frozenset()
    return frozenset({(status.st_dev, status.st_ino)})


def _without_journals(files: Iterable[OpenFile], database: str) -> list[OpenFile]:
    """Return ``files`` without the journals of ``database``, which SQLite creates for a change and then removes.

    IPython writes its history when a cell starts, so nearly every launch would otherwise find a file that it has not
    seen before and search the heap for the file object.
    """
    beginning = f"{database}-"
    return [file for file in files if not (file.can_be_written and file.name.startswith(beginning))]


_last_look: tuple[dict[int, list[weakref.ref[Any]]], set[tuple[int, ...]]] = ({}, set())
"""Descriptor -> file objects, and the identities of files that C code has opened. A scan of all objects in a kernel
takes 20 ms and is not repeated for the same files.
"""


def file_objects(fds: Collection[int]) -> dict[int, list[Any]]:
    """Return the file objects that Python has opened in this process, by descriptor; the outermost come first."""
    global _last_look
    logs = _logs_of_parent()
    identities = {fd: identity for fd in fds if (identity := _look_of(fd, logs)) is not None}
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
    """Return the file objects from the last scan; None if they may not belong to this file."""
    objects, opened_by_c = _last_look
    if identity in opened_by_c:
        return []
    files = [reference() for reference in objects.get(fd, ())]
    return files if files and all(_number(file) == fd for file in files) else None


def _look_of(fd: int, logs: Collection[tuple[int, int]]) -> tuple[int, ...] | None:
    """Return what distinguishes a file from a later one with the same descriptor or inode.

    Return None if a thread, such as IPython's history thread, has closed the file in the meantime.
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
    except Exception:  # closed, detached, or a wrapper around a user's object
        return -1
    return number


def _flush(file: Any) -> Exception | None:
    """Flush ``file``; return the error that left data in its buffer."""
    try:
        file.flush()
    except Exception as error:  # for example, the disk is full, or the function has closed the file
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
            with suppress(OSError):  # a kernel thread closed it before the fork
                kept.append((fd, os.dup(fd), os.get_inheritable(fd)))
                os.dup2(null, fd, inheritable=False)
        output.flush_c_streams()
    finally:
        for fd, copy, inheritable in kept:
            with suppress(OSError):  # replacing it also failed: Valgrind reserves descriptors for itself
                os.dup2(copy, fd, inheritable=inheritable)
            os.close(copy)
        os.close(null)
