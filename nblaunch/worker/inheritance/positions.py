"""Positions in a process's open files, and separate positions for a process that was forked from it.

A fork copies descriptors. All copies of a descriptor share one *open file description*, which holds the position
(open(2), "Open file descriptions"): if one process seeks, the position changes for all. A forked process reopens each
file under the same descriptor, at the position that was recorded before the fork. Locks stay with the kernel's files.

Python's buffers need no change, because a fork copies the data that was read ahead, and this data ends at the
descriptor's position.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from nblaunch.host import descriptors

_FOLDER = "/proc/self/fd"
_FIRST = 3  # standard input and output are replaced elsewhere
_MAX_TRIED = 1024
"""Descriptors below this number are tried if the system does not list a process's descriptors."""

_PATH_ONLY = getattr(os, "O_PATH", 0)
_ONLY_AT_FIRST = (
    os.O_CREAT | os.O_EXCL | os.O_TRUNC | os.O_NOFOLLOW | os.O_DIRECTORY | getattr(os, "O_TMPFILE", 0)
)
"""Flags that matter only while a file is being opened."""


Identity = tuple[int, int]
"""Device and inode of a file, pipe or socket. Descriptors do not identify a file: a memory map duplicates its
descriptor, and the system reuses the numbers of closed descriptors.
"""


@dataclass(frozen=True)
class OpenFile:
    """A regular file or a folder that this process has open.

    Args:
        fds: its descriptors; several if they share a position, for example after ``os.dup``.
        flags: the flags that it was opened with.
        position: its position, in bytes.
        device: device of its file system.
        inode: its inode in that file system.
    """

    fds: tuple[int, ...]
    flags: int
    position: int
    device: int
    inode: int

    @property
    def is_open(self) -> bool:
        """Whether the file is still open. Threads such as IPython's history thread may close files at any time."""
        try:
            return self.is_at(self.fds[0])
        except OSError:
            return False

    def is_at(self, fd: int) -> bool:
        """Return whether ``fd`` refers to this file."""
        return identity(fd) == (self.device, self.inode)

    @property
    def can_be_read(self) -> bool:
        """Whether it is open for reading, or for reading and writing."""
        return self.flags & os.O_ACCMODE != os.O_WRONLY

    @property
    def can_be_written(self) -> bool:
        """Whether it is open for writing, or for reading and writing."""
        return self.flags & os.O_ACCMODE != os.O_RDONLY

    @property
    def name(self) -> str:
        """Its path, if the system has one."""
        try:
            return os.readlink(f"{_FOLDER}/{self.fds[0]}")
        except OSError:
            return f"descriptor {self.fds[0]}"


def identity(fd: int) -> Identity:
    """Return the identity of the file, pipe or socket that ``fd`` refers to."""
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


@dataclass(frozen=True)
class OpenDescriptors:
    """The open descriptors of this process that a forked process inherits, except the standard ones.

    Args:
        files: regular files and folders.
        streams: pipes and terminals that are open for writing, by descriptor.
        sockets: sockets, by descriptor.
    """

    files: Collection[OpenFile]
    streams: Mapping[int, Identity]
    sockets: Mapping[int, Identity]

    @classmethod
    def of_this_process(cls, ours: Collection[Identity]) -> OpenDescriptors:
        """Return the open descriptors, after looking at each of them once.

        Args:
            ours: nblaunch's own descriptors, which are skipped. Descriptors that no child inherits are also skipped.
        """
        alike: dict[OpenFile, list[int]] = {}
        streams: dict[int, Identity] = {}
        sockets: dict[int, Identity] = {}
        for fd in _numbers():
            if fd < _FIRST or descriptors.is_kept_from_children(fd):
                continue
            try:
                status = os.fstat(fd)
                identity = status.st_dev, status.st_ino
                if identity in ours:
                    continue
                kind = stat.S_IFMT(status.st_mode)
                if kind == stat.S_IFSOCK:
                    sockets[fd] = identity
                elif kind in (stat.S_IFREG, stat.S_IFDIR):
                    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
                    if not flags & _PATH_ONLY:  # such a descriptor can't be read
                        file = OpenFile((), flags, os.lseek(fd, 0, os.SEEK_CUR), *identity)
                        alike.setdefault(file, []).append(fd)
                # Drivers of other devices may react to each close.
                elif (kind == stat.S_IFIFO or (kind == stat.S_IFCHR and os.isatty(fd))) and _is_writable(fd):
                    streams[fd] = identity
            except OSError:  # closed in the meantime
                continue
        files = [
            replace(file, fds=tuple(shared))
            for file, fds in alike.items()
            for shared in _sharing(fds, file.flags)
        ]
        return cls(files, streams, sockets)


def renew(files: Collection[OpenFile]) -> list[OpenFile]:
    """Give this process its own positions in inherited files; return the files that can't have their own position."""
    return [file for file in files if file.can_be_read and not _renew(file) and file.is_open]


def is_open(fd: int) -> bool:
    """Return whether this process has a descriptor with this number."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def _numbers() -> Iterator[int]:
    """Yield the descriptors of this process, and maybe some that are closed."""
    try:
        yield from map(int, os.listdir(_FOLDER))
    except OSError:
        yield from range(_MAX_TRIED)


def _is_writable(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY


def _sharing(fds: Sequence[int], flags: int) -> Collection[Sequence[int]]:
    """Group the ``fds`` that share an open file description and therefore its flags.

    The flag ``O_NONBLOCK`` has no effect on files and folders. In one round per bit, the flag is set through every
    descriptor to that bit of the descriptor's index in ``fds``, and is then read through every descriptor. The bits
    that are read through a descriptor form the index of the last descriptor that shares its open file description.
    Descriptors that a thread closes in the meantime are left out.
    """
    if len(fds) == 1:
        return [fds]
    last = dict.fromkeys(fds, 0)
    try:
        for bit in range(len(fds).bit_length()):
            for place, fd in enumerate(fds):
                mark = os.O_NONBLOCK if place >> bit & 1 else 0
                with suppress(OSError):
                    fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_NONBLOCK | mark)
            for fd in tuple(last):
                try:
                    mark = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_NONBLOCK
                    last[fd] |= bool(mark) << bit
                except OSError:
                    del last[fd]
    finally:
        for fd in fds:
            with suppress(OSError):
                fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    together: dict[int, list[int]] = {}
    for fd, place in last.items():
        together.setdefault(place, []).append(fd)
    return together.values()


def _renew(file: OpenFile) -> bool:
    """Reopen ``file`` under the same descriptors; return whether that succeeded."""
    try:
        opened = _open_again(file)
    except OSError:
        return False
    try:
        if not file.is_at(opened):  # a kernel thread closed the file and opened another
            return False
        if file.position:
            os.lseek(opened, file.position, os.SEEK_SET)
        for fd in file.fds:
            os.dup2(opened, fd, inheritable=os.get_inheritable(fd))
        return True
    except OSError:
        return False
    finally:
        os.close(opened)


def _open_again(file: OpenFile) -> int:
    """Open the same file, even if it was deleted or moved; without ``/proc``, open it by name.

    Raises:
        OSError: this process may not open the file, or the file does not exist.
    """
    link, flags = f"{_FOLDER}/{file.fds[0]}", file.flags & ~_ONLY_AT_FIRST
    try:
        return os.open(link, flags)
    except OSError:
        return os.open(os.readlink(link), flags)
