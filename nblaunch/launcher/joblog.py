"""What workers print, on disk: one folder a job, one file a rank and attempt.

    <log folder, mode 0700>/
      20261120-153000-4242-1/          one job: time, process id of the kernel, number in that kernel;
                                       where another container has made that one, a random number besides
        .nblaunch_job.json             stamps the folder as ours: its name, its machine and its kernel
        attempt_0/
          rank_0.log                   everything that rank 0 printed
          rank_0.stacks                stacks that faulthandler wrote, after a crash or on request

Files of ended jobs stay, so that what was printed before any crash can be read; the oldest jobs are pruned. Only a
folder that carries its stamp is ever removed: a log folder may be one that holds other things, under any names. A job's
folder that is renamed or copied is no longer ours, and stays.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from nblaunch import env
from nblaunch.errors import LaunchError
from nblaunch.host import disk
from nblaunch.launcher.logtail import read_log

_job_numbers = itertools.count(1)
_PRUNE_EVERY = 20
"""jobs of a kernel. Most prune once their workers run; those that are over before that must not pile up."""

_STAMP_NAME = ".nblaunch_job.json"

_REMEDY = "Choose another with log_dir= or NBLAUNCH_LOG_DIR."

_in_use: set[Path] = set()
"""Folders of this process's jobs that still run."""


class LogFolder:
    """The log files of a job, to be read.

    Args:
        path: of its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def attempt_path(self, attempt: int) -> Path:
        """Return the folder of an attempt."""
        return self.path / f"attempt_{attempt}"

    def attempts(self) -> list[int]:
        """Return the numbers of the attempts that there were by now."""
        numbers = (path.name.rpartition("_")[2] for path in self.path.glob("attempt_*"))
        return sorted(int(number) for number in numbers if number.isdecimal())

    def log_path(self, rank: int, attempt: int = 0) -> Path:
        """Return the file of what a rank prints."""
        return self.attempt_path(attempt) / f"rank_{rank}.log"

    def stacks_path(self, rank: int, attempt: int = 0) -> Path:
        """Return the file of a rank's stacks."""
        return self.attempt_path(attempt) / f"rank_{rank}.stacks"

    def read(self, rank: int, attempt: int, max_bytes: int | None = None) -> str:
        """Return what a rank has printed in an attempt, or its last ``max_bytes``."""
        return read_log(self.log_path(rank, attempt), max_bytes)

    def read_stacks(self, rank: int, attempt: int) -> str:
        """Return what faulthandler has written for a rank in an attempt."""
        return read_log(self.stacks_path(rank, attempt))


class JobLog(LogFolder):
    """The log folder of one job, made anew.

    Args:
        folder: where jobs' folders are; None = ``NBLAUNCH_LOG_DIR``, or a folder of this user in the temporary folder.
        name: of the job's own folder; None = by the time and this process.

    Raises:
        LaunchError: the folder can't be made, or belongs to another user.
    """

    def __init__(self, folder: str | None = None, name: str | None = None) -> None:
        self._root = log_root(folder)
        self._max_jobs: int = env.read("NBLAUNCH_KEEP_JOBS")
        number = next(_job_numbers)
        super().__init__(_make_folder(self._root, name, number))
        stamp = {"job": self.path.name, "host": socket.gethostname(), "pid": os.getpid()}
        # On a full disk it stays without; then it is not pruned, and there is nothing in it that takes room.
        with suppress(OSError):
            (self.path / _STAMP_NAME).write_text(json.dumps(stamp) + "\n", encoding="utf-8")
        _in_use.add(self.path)
        if number % _PRUNE_EVERY == 0:
            with suppress(OSError):  # old logs are no reason to refuse a job
                self.prune()

    def end(self) -> None:
        """Handle the end of the job: its files stay, and may be pruned when it is old."""
        _in_use.discard(self.path)

    def prune(self) -> None:
        """Remove the oldest jobs beyond ``NBLAUNCH_KEEP_JOBS``.

        It takes milliseconds, so it is called while workers run; at every twentieth job also before, since short jobs
        end without it.
        """
        _prune(self._root, max_jobs=self._max_jobs, current=self.path.name)

    def make_attempt_folder(self, attempt: int, ranks: Iterable[int]) -> None:
        """Make the folder of an attempt with the files of its ranks, which then need nothing but room to write in.

        Raises:
            LaunchError: the file system has no place for them.
        """
        folder = self.attempt_path(attempt)
        try:
            folder.mkdir(mode=0o700)
            for rank in ranks:
                for path in (self.log_path(rank, attempt), self.stacks_path(rank, attempt)):
                    path.touch(mode=0o600, exist_ok=False)
        except OSError as error:
            refusal = _refusal(f"the logs of the ranks in {folder} can't be made", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # it is not empty
                self.path.rmdir()
            raise refusal from error

    def new_file(self, name: str) -> Path:
        """Make an empty file of the job's own, beside the attempts.

        Raises:
            LaunchError: the file system has no place for it.
        """
        path = self.path / name
        try:
            path.touch(mode=0o600)
        except OSError as error:
            raise _refusal(f"the log {path} can't be made", path, error) from error
        return path


def _make_folder(root: Path, name: str | None, number: int) -> Path:
    """Make the folder of a job, as :class:`JobLog` describes it; return its path."""
    path = root / (name or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{number}")
    try:
        path.mkdir(mode=0o700)
    except OSError as error:
        if isinstance(error, FileExistsError) and name is None:
            # Of another container, in which a process has the same number.
            return _make_folder(root, f"{path.name}-{os.urandom(4).hex()}", number)
        raise _refusal(f"the job's log folder {path} can't be made", path, error) from error
    return path


def log_root(folder: str | None = None) -> Path:
    """Return the folder in which jobs' folders are, which is made if it is not there.

    Args:
        folder: which; None = ``NBLAUNCH_LOG_DIR``, or a folder of this user in the temporary folder.

    Raises:
        LaunchError: it can't be made, or belongs to another user.
    """
    chosen = folder or env.read("NBLAUNCH_LOG_DIR")
    root = Path(chosen).expanduser().absolute() if chosen else _temporary_root()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.stat()
    except OSError as error:
        raise _refusal(f"the log folder {root} can't be made", root, error) from error
    if not chosen and (status.st_uid != os.getuid() or root.is_symlink() or not stat.S_ISDIR(status.st_mode)):
        raise LaunchError(f"the log folder {root} belongs to another user. {_REMEDY}")
    return root


def _temporary_root() -> Path:
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:  # it writes a file to each that might be one
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        why = disk.reason(Path("/tmp"), full)
        raise LaunchError(f"no temporary folder for logs can be written to: {why}. {_REMEDY}") from error
    return Path(folder) / f"nblaunch-{os.getuid()}"


def _refusal(what: str, path: Path, error: OSError) -> LaunchError:
    return LaunchError(f"{what}: {disk.reason(path, error)}. {_REMEDY}")


def _stamp_of(folder: Path) -> tuple[int, Path, int] | None:
    """Return when a folder was made, it, and its kernel's process; None where it is not a job's, or was moved.

    Nor of a job of another machine that shares the log folder: whether its process still runs can't be seen from here.
    """
    path = folder / _STAMP_NAME
    try:
        status = path.lstat()
        if folder.is_symlink() or not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            return None
        stamp = json.loads(path.read_bytes())
        is_ours = (stamp["job"], stamp["host"]) == (folder.name, socket.gethostname())
        return (status.st_mtime_ns, folder, int(stamp["pid"])) if is_ours else None
    except (OSError, LookupError, TypeError, ValueError):
        return None  # it is not one that we have written


def _prune(root: Path, max_jobs: int, current: str) -> None:
    """Remove the oldest jobs beyond ``max_jobs`` of this machine, but none that still runs, in whichever process."""
    stamps = sorted(
        stamp for name in os.listdir(root) if name != current and (stamp := _stamp_of(root / name))
    )
    for _, folder, pid in stamps[: max(0, len(stamps) - (max_jobs - 1))]:
        is_over = folder not in _in_use if pid == os.getpid() else not _is_alive(pid)
        if is_over:
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is another user's
    return True
