"""The logs of workers: one folder per job, one file per rank and attempt.

    <log folder, mode 0700>/
      20261120-153000-4242-1/          one job: time, process id of the kernel, number in that kernel;
                                       plus a random number if another container has used that name
        .nblaunch_job.json             marks the folder as nblaunch's: its name, kernel and machine
        attempt_0/
          rank_0.log                   everything that rank 0 printed
          rank_0.stacks                stacks that faulthandler wrote, after a crash or on request

Logs of ended jobs are kept, so that you can read them after a crash; the logs of the oldest jobs are pruned. Only
folders with nblaunch's stamp are ever removed, because the log folder may contain other files. Renamed or copied job
folders are kept. A running job locks its folder, so that tools that clean up temporary files skip it.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nblaunch import env
from nblaunch.errors import LaunchError
from nblaunch.host import descriptors, files
from nblaunch.host.machine import ProcessMark, ProcessState
from nblaunch.launcher.logtail import read_log
from nblaunch.wire import schema

_job_numbers = itertools.count(1)
_PRUNE_EVERY = 20
"""One in this many jobs prunes logs before it starts. The others prune once their workers are running, unless
they end first."""

_STAMP_NAME = ".nblaunch_job.json"

_ADVICE = "Choose another with log_dir= or NBLAUNCH_LOG_DIR."

_VISIBLE = (ProcessState.RUNS, ProcessState.ENDED, ProcessState.RESTARTED)
"""States of processes that this process can see; processes on other machines or in other containers are
invisible to it."""

_in_use: set[Path] = set()
"""Folders of this process's running jobs."""


@dataclass(frozen=True)
class _Stamp:
    """Marks a folder as a job folder.

    Args:
        job: name of the folder.
        process: process that watches the job.
    """

    job: str
    process: ProcessMark


class LogFolder:
    """The log files of a job, for reading.

    Args:
        path: path of its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._attempts: dict[int, Path] = {}

    def attempt_path(self, attempt: int) -> Path:
        """Return the folder of an attempt."""
        if attempt not in self._attempts:
            self._attempts[attempt] = self.path / f"attempt_{attempt}"
        return self._attempts[attempt]

    def attempts(self) -> list[int]:
        """Return the numbers of the attempts so far."""
        parts = (name.partition("attempt_") for name in self._names())
        return sorted(int(number) for before, _, number in parts if not before and number.isdecimal())

    def opener(self, path: str, flags: int) -> int:
        """Open a file in the folder, like :func:`os.open`."""
        return os.open(path, flags)

    def _names(self) -> list[str]:
        """Return the names of the folder's entries."""
        return os.listdir(self.path) if self.path.is_dir() else []

    def log_path(self, rank: int, attempt: int = 0) -> Path:
        """Return the log file of a rank."""
        return self.attempt_path(attempt) / f"rank_{rank}.log"

    def stacks_path(self, rank: int, attempt: int = 0) -> Path:
        """Return the file with a rank's stacks."""
        return self.attempt_path(attempt) / f"rank_{rank}.stacks"

    def read(self, rank: int, attempt: int, max_bytes: int | None = None) -> str:
        """Return the output of a rank in an attempt, or its last ``max_bytes``."""
        return read_log(self.log_path(rank, attempt), max_bytes, self.opener)

    def read_stacks(self, rank: int, attempt: int) -> str:
        """Return the stacks that faulthandler wrote for a rank in an attempt."""
        return read_log(self.stacks_path(rank, attempt), opener=self.opener)


class JobLog(LogFolder):
    """The new log folder of a job.

    Args:
        folder: folder that contains the folders of all jobs; None = ``NBLAUNCH_LOG_DIR``, or a per-user
            folder in the temporary folder.
        name: name of the job's folder; None = generated from the time and this process.

    Raises:
        LaunchError: the folder can't be created, or belongs to another user.
    """

    def __init__(self, folder: str | None = None, name: str | None = None) -> None:
        self._lock_fd, self._pid = -1, os.getpid()
        self._root = log_root(folder)
        self._max_jobs: int = env.read("NBLAUNCH_KEEP_JOBS")
        number = next(_job_numbers)
        super().__init__(_make_folder(self._root, name, number))
        self.mark()
        _in_use.add(self.path)
        if number % _PRUNE_EVERY == 0:
            with suppress(OSError):  # problems with old logs must not prevent a job
                self.prune()

    def mark(self) -> None:
        """Stamp the folder as nblaunch's, and lock it until the end of the job."""
        stamp = _Stamp(self.path.name, ProcessMark.own())
        # On a full disk the folder stays unstamped. It is then never pruned, but it is almost empty.
        with suppress(OSError):
            path = self.path / _STAMP_NAME
            path.touch(mode=0o600)
            path.write_bytes(schema.dump(stamp) + b"\n")
        self._unlock()
        with suppress(OSError):  # there may be no descriptor left
            self._lock_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            descriptors.keep_from_children(self._lock_fd)
            files.keep_from_cleaners(self._lock_fd)

    def end(self) -> None:
        """Handle the end of the job: its files are kept until they are pruned."""
        _in_use.discard(self.path)
        self._unlock()

    def remove(self) -> None:
        """Remove the folder of a job that could not be started."""
        self.end()
        shutil.rmtree(self.path, ignore_errors=True)

    def _unlock(self) -> None:
        # A forked child closed the descriptor at once and may have reused its number.
        if self._lock_fd >= 0 and self._pid == os.getpid():
            descriptors.close(self._lock_fd)
        self._lock_fd = -1

    def __del__(self) -> None:
        self._unlock()

    def prune(self) -> None:
        """Remove the oldest job folders beyond ``NBLAUNCH_KEEP_JOBS``, unless their jobs may be running in any process.

        Pruning takes milliseconds, so it happens while workers are running. Every twentieth job also prunes before its
        start, because short jobs end before they can prune.
        """
        names = [name for name in os.listdir(self._root) if name != self.path.name]
        if len(names) < self._max_jobs:
            return
        stamps = [stamp for name in names if (stamp := _stamp_of(self._root / name))]
        visible_jobs = [
            (made_ns, folder, process, state)
            for made_ns, folder, process in sorted(stamps, key=lambda stamp: stamp[:2])
            if (state := process.state(made_ns / 1e9)) in _VISIBLE
            # A clone of this machine may have started the job before this machine booted.
            and (state is not ProcessState.RESTARTED or process.machine.name == socket.gethostname())
        ]
        for _, folder, process, state in visible_jobs[: max(0, len(visible_jobs) - (self._max_jobs - 1))]:
            is_own = state is ProcessState.RUNS and process.pid == os.getpid()
            if (folder not in _in_use) if is_own else (state is not ProcessState.RUNS):
                shutil.rmtree(folder, ignore_errors=True)

    def make_attempt_folder(self, attempt: int, ranks: Iterable[int]) -> None:
        """Create the folder of an attempt and its ranks' files, so that later writes need only disk space.

        Raises:
            LaunchError: the file system has no space for them.
        """
        folder = self.attempt_path(attempt)
        try:
            folder.mkdir(mode=0o700)
            for rank in ranks:
                for path in (self.log_path(rank, attempt), self.stacks_path(rank, attempt)):
                    path.touch(mode=0o600, exist_ok=False)
        except OSError as error:
            problem = _log_error(f"can't create the logs of the ranks in {folder}", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # the folder is not empty
                self.path.rmdir()
            raise problem from error

    def new_file(self, name: str) -> Path:
        """Create an empty file for the job, next to the folders of its attempts.

        Raises:
            LaunchError: the file system has no space for it.
        """
        path = self.path / name
        try:
            path.touch(mode=0o600)
        except OSError as error:
            raise _log_error(f"can't create the log {path}", path, error) from error
        return path


def _make_folder(root: Path, name: str | None, number: int) -> Path:
    """Create the folder of a job as :class:`JobLog` describes; return its path."""
    path = root / (name or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{number}")
    try:
        path.mkdir(mode=0o700)
    except OSError as error:
        if isinstance(error, FileExistsError) and name is None:
            # A process with the same id in another container created the folder.
            return _make_folder(root, f"{path.name}-{os.urandom(4).hex()}", number)
        raise _log_error(f"can't create the job's log folder {path}", path, error) from error
    return path


def log_root(folder: str | None = None) -> Path:
    """Return the folder that contains jobs' folders; create it if it does not exist.

    Args:
        folder: the folder; None for ``NBLAUNCH_LOG_DIR`` or, if that is not set, a per-user folder in the temporary
            folder.

    Raises:
        LaunchError: the folder can't be created, or belongs to another user.
    """
    chosen = folder or env.read("NBLAUNCH_LOG_DIR")
    root = Path(chosen).expanduser().absolute() if chosen else _temporary_root()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.stat()
    except OSError as error:
        raise _log_error(f"can't create the log folder {root}", root, error) from error
    if not chosen and (status.st_uid != os.getuid() or root.is_symlink() or not stat.S_ISDIR(status.st_mode)):
        raise LaunchError(f"the log folder {root} belongs to another user. {_ADVICE}")
    return root


def _temporary_root() -> Path:
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:  # gettempdir() writes a file to each candidate
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        why = files.reason_of(Path("/tmp"), full)
        raise LaunchError(f"no temporary folder is writable for logs: {why}. {_ADVICE}") from error
    return Path(folder) / f"nblaunch-{os.getuid()}"


def _log_error(what: str, path: Path, error: OSError) -> LaunchError:
    return LaunchError(f"{what}: {files.reason_of(path, error)}. {_ADVICE}")


def _stamp_of(folder: Path) -> tuple[int, Path, ProcessMark] | None:
    """Return a job's creation time, folder and watching process; None if this is not a job's folder or was moved."""
    path = folder / _STAMP_NAME
    try:
        status = path.lstat()
        if folder.is_symlink() or not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            return None
        stamp = schema.load(_Stamp, path.read_bytes())
        return (status.st_mtime_ns, folder, stamp.process) if stamp.job == folder.name else None
    except (OSError, ValueError):
        return None  # nblaunch did not write this file
