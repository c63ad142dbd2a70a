"""Disk space: frees and reserves parts of files, and explains why a file system can't take more data."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from nblaunch import formatting

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # FALLOC_FL_*: linux/falloc.h
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def free_range(fd: int, start: int, length: int) -> None:
    """Free a range of bytes in a file; the rest stays unchanged.

    Raises:
        OSError: the file system does not support it.
    """
    _allocate(fd, _KEEP_SIZE | _PUNCH_HOLE, start, length)


def growth_problem(path: Path, num_bytes: int) -> str | None:
    """Return the :func:`reason` why a file can't grow by ``num_bytes``; None if it can, or if this is unknown.

    The call reserves the space if there is enough; the file's contents and size stay unchanged.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        _allocate(fd, _KEEP_SIZE, os.fstat(fd).st_size, num_bytes)
    except OSError as error:
        return reason(path, error) if error.errno in _FULL else None
    finally:
        os.close(fd)
    return None


def free_bytes(path: Path) -> int | None:
    """Return how much this user can still write to the file system of ``path``; None if unknown."""
    try:
        status = os.statvfs(next(folder for folder in (path, *path.parents) if folder.exists()))
    except OSError:
        return None
    return (status.f_bfree if os.geteuid() == 0 else status.f_bavail) * status.f_frsize


def reason(path: Path, error: OSError) -> str:
    """Return the reason for ``error``: the file system's state if that explains the error, or else the error's text."""
    if error.errno == errno.ENOSPC:
        return _lack(path) or str(error.strerror)
    return str(error.strerror or error)


def _lack(path: Path) -> str | None:
    """Return which resource of ``path``'s file system is exhausted; None if there is none."""
    try:
        place = next(folder for folder in (path, *path.parents) if folder.exists())
        status = os.statvfs(place)
        while not place.is_mount():
            place = place.parent
    except OSError:
        return None
    is_root = os.geteuid() == 0  # file systems keep a reserve for root
    if status.f_files and (status.f_ffree if is_root else status.f_favail) == 0:
        return f"no inodes are left on {place}: all {status.f_files:,} are in use"
    num_blocks = status.f_bfree if is_root else status.f_bavail
    if num_blocks <= 1:
        return f"the disk at {place} is full: all {formatting.size(status.f_blocks * status.f_frsize)} are in use"
    return None


def _allocate(fd: int, mode: int, start: int, length: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fallocate = libc.fallocate
    except AttributeError:  # not Linux
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS)) from None
    if fallocate(fd, mode, ctypes.c_int64(start), ctypes.c_int64(length)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
