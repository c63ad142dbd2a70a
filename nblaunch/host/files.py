"""Files that are replaced atomically, folders that are private to a user, and space on disks.

A private folder is opened once (:func:`open_private`): nblaunch reads the folder's owner and mode from the open
descriptor, and opens the folder's files relative to this descriptor. A user who may rename the folder, or one above it,
can't put another folder in its place between the check and the use.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from nblaunch import formatting

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

_NO_FOLDER_SYNC = (errno.EINVAL, errno.EBADF, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EACCES)
"""Error numbers on file systems that have no fsync for folders (FUSE mounts of cloud storage, some network disks)."""


def make_private_folder(path: Path) -> None:
    """Create a folder and its missing parents, accessible only to this user, regardless of the umask.

    Raises:
        OSError: it can't be created.
    """
    if not path.is_dir():
        if not path.parent.is_dir():
            make_private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def open_private(path: Path | str, dir_fd: int | None = None) -> int:
    """Open a folder that only this user can have written to; return the descriptor.

    Args:
        path: path of the folder.
        dir_fd: descriptor of the folder that a relative path starts from.

    Raises:
        PermissionError: it is not a folder, belongs to another user, or is accessible to other users; the message says
            which.
        FileNotFoundError: it does not exist.
        OSError: it can't be opened.
    """
    try:
        fd = os.open(path, _FOLDER, dir_fd=dir_fd)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):  # a file, or a link, wherever it leads
            raise PermissionError("is not a folder of this user") from None
        raise
    status = os.fstat(fd)
    if status.st_uid != os.getuid():
        problem = "is not a folder of this user"
    elif status.st_mode & 0o077:
        problem = f"can be accessed by other users (mode {stat.S_IMODE(status.st_mode):04o})"
    else:
        return fd
    os.close(fd)
    raise PermissionError(problem)


@contextmanager
def private_folder(path: Path) -> Iterator[int]:
    """Open a folder as :func:`open_private` does, and close it after the block."""
    fd = open_private(path)
    try:
        yield fd
    finally:
        os.close(fd)


def keep_from_cleaners(folder_fd: int) -> None:
    """Lock a folder while the descriptor is open: programs that clean up temporary files skip it and its contents.

    Source: tmpfiles.d(5), "a BSD file lock". Does nothing on file systems without such locks.
    """
    with suppress(OSError):
        fcntl.flock(folder_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)


def read(folder_fd: int, name: str) -> bytes | None:
    """Return the contents of a file in a folder; None if it does not exist.

    Raises:
        OSError: it can't be read.
    """
    try:
        fd = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder_fd)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        return file.read()


def read_end(path: Path, max_bytes: int) -> bytes:
    """Return the last ``max_bytes`` bytes of a file; no bytes if it can't be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - max_bytes))
            return file.read()
    except OSError:
        return b""


def replace(
    folder_fd: int, name: str, write: Callable[[IO[bytes]], object], *, is_lasting: bool = True
) -> None:
    """Replace a file atomically: it always has either its old or its new contents.

    Args:
        folder_fd: descriptor of its folder; no other process may write a file with this name there.
        name: name of the file.
        write: writes the contents to a file that is also open for reading.
        is_lasting: whether to force the file to the disk, so that it survives a power failure.

    Raises:
        OSError: for example, the disk is full; the file is unchanged.
    """
    aside = f"{name}.new"
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(aside, flags, 0o600, dir_fd=folder_fd), "w+b") as file:
            write(file)
            file.flush()
            if is_lasting:
                os.fsync(file.fileno())
        os.rename(aside, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    except BaseException:
        with suppress(OSError):
            os.unlink(aside, dir_fd=folder_fd)
        raise
    if is_lasting:
        sync_folder(folder_fd)


def reserve(folder_fd: int, name: str, num_bytes: int) -> None:
    """Create a file that reserves disk space for :func:`replace_within`.

    Raises:
        OSError: the disk has too little space.
    """
    zeros = bytes(num_bytes)
    replace(folder_fd, name, lambda file: file.write(zeros), is_lasting=False)


def replace_within(folder_fd: int, name: str, data: bytes, reserve_name: str) -> None:
    """Replace a file atomically, even if the disk is full, by using the space that :func:`reserve` has set aside.

    Raises:
        OSError: the reserved space is gone, and the disk is too full.
    """
    try:
        fd = os.open(reserve_name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
    except FileNotFoundError:
        return replace(folder_fd, name, lambda file: file.write(data))
    with open(fd, "r+b") as file:
        file.write(data)
        file.truncate()
        file.flush()
        os.fsync(fd)
    os.rename(reserve_name, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    return sync_folder(folder_fd)


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Replace a file atomically and durably with the file that ``write(other_path)`` writes.

    Like :func:`replace`, but for paths that the user chooses: the file gets the mode that ``write`` gives it.

    Raises:
        Exception: ``write`` raised it; the file is unchanged.
        OSError: for example, the disk is full; the file is unchanged.
    """
    aside = path.with_name(f".{path.name}.partial")
    try:
        write(aside)
        sync_file(aside)
        os.replace(aside, path)
    except BaseException as error:
        with suppress(OSError):
            aside.unlink()
        if isinstance(error, OSError) and error.filename == str(aside) and error.filename2 is None:
            error.filename = str(path)  # the user chose this path, and doesn't know the other
        raise
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Force a file's contents to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(folder: int | Path) -> None:
    """Force the names in a folder to disk, if the file system supports it; ``folder`` is a descriptor or a path."""
    try:
        os.fsync(folder) if isinstance(folder, int) else sync_file(folder)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise


def make_once(folder_fd: int, name: str, contents: bytes) -> bytes:
    """Return the contents of a file in a folder; create it with ``contents`` if it does not exist.

    If several processes call this at the same time, all of them return the same contents.

    Raises:
        OSError: it can't be created or read.
    """
    present = read(folder_fd, name)
    if present is not None:
        return present
    aside = f"{name}.{secrets.token_hex(8)}"
    fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder_fd)
    try:
        with open(fd, "wb") as file:
            file.write(contents)
            file.flush()
            os.fsync(file.fileno())
        with suppress(FileExistsError):  # another process was faster
            os.link(aside, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
    finally:
        os.unlink(aside, dir_fd=folder_fd)
    return read(folder_fd, name) or contents


# --- disk space -------------------------------------------------------------------------------------------------------

_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # FALLOC_FL_*: linux/falloc.h
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def free_range(fd: int, start: int, length: int) -> None:
    """Free a range of bytes in a file; the rest stays unchanged.

    Raises:
        OSError: the file system does not support it.
    """
    _allocate(fd, _KEEP_SIZE | _PUNCH_HOLE, start, length)


def growth_problem(path: Path, num_bytes: int) -> str | None:
    """Return the :func:`reason_of` why a file can't grow by ``num_bytes``; None if it can, or if this is unknown.

    The call reserves the space if there is enough; the file's contents and size stay unchanged.
    """
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        _allocate(fd, _KEEP_SIZE, os.fstat(fd).st_size, num_bytes)
    except OSError as error:
        return reason_of(path, error) if error.errno in _FULL else None
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


def reason_of(path: Path, error: OSError) -> str:
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
