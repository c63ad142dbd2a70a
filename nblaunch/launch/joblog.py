"""What workers print, on disk: one folder a job, one file a rank and attempt.

    <log folder, mode 0700>/
      20261120-153000-4242-1/          one job: time, process id of the kernel, number in that kernel
        .nblaunch_job.json             marks the folder as ours: its name, its kernel, when it was made
        attempt_0/
          rank_0.log                   everything that rank 0 printed
          rank_0.message                 text of its exception, where that is too long to be shown
          rank_0.stacks                stacks that faulthandler wrote, after a crash or on request

Files of ended jobs stay, so that what was printed before any crash can be read; the oldest jobs are pruned. Only a
folder that carries its mark is ever removed: a log folder may be one that holds other things, under any names. A job's
folder that is renamed or copied is no longer ours, and stays.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import stat
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from nblaunch import env
from nblaunch.errors import LaunchError

_job_numbers = itertools.count(1)
_PRUNE_EVERY = 20
"""jobs of a kernel. Most prune once their workers run; those that are over before that must not pile up."""

_MARK = ".nblaunch_job.json"
_MAX_MARK_BYTES = 4096

_in_use: set[Path] = set()
"""Folders of this process's jobs that still run."""


class JobLog:
    """The log folder of one job.

    Args:
        folder: where jobs' folders are; None = ``NBLAUNCH_LOG_DIR``, or a folder of this user in the temporary folder.

    Raises:
        LaunchError: the folder can't be made, or belongs to somebody else.
    """

    def __init__(self, folder: str | None = None) -> None:
        self._root = _root(folder)
        number = next(_job_numbers)
        self.path = self._root / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{number}"
        mark = _Mark(self.path.name, socket.gethostname(), os.getpid(), number, made_s=time.time())
        try:
            self.path.mkdir(mode=0o700)
            mark.write(self.path)
        except OSError as error:
            raise LaunchError(f"the job's log folder {self.path} can't be made: {error.strerror}") from error
        _in_use.add(self.path)
        if number % _PRUNE_EVERY == 0:
            self.prune()

    def end(self) -> None:
        """The job is over: its files stay, and may be pruned when it is old."""
        _in_use.discard(self.path)

    def prune(self) -> None:
        """Remove the oldest jobs beyond ``NBLAUNCH_KEEP_JOBS``. Called while the workers run: it takes milliseconds."""
        _prune(self._root, keep=env.read("NBLAUNCH_KEEP_JOBS"), current=self.path.name)

    def start_attempt(self, attempt: int) -> None:
        """Make the folder of an attempt."""
        self.attempt_path(attempt).mkdir(mode=0o700)

    def attempt_path(self, attempt: int) -> Path:
        """The folder of an attempt."""
        return self.path / f"attempt_{attempt}"

    def log_path(self, rank: int, attempt: int = 0) -> Path:
        """The file of what a rank prints."""
        return self.attempt_path(attempt) / f"rank_{rank}.log"

    def stacks_path(self, rank: int, attempt: int = 0) -> Path:
        """The file of a rank's stacks."""
        return self.attempt_path(attempt) / f"rank_{rank}.stacks"


def _root(folder: str | None) -> Path:
    chosen = folder or env.read("NBLAUNCH_LOG_DIR")
    root = (
        Path(chosen).expanduser().absolute()
        if chosen
        else Path(tempfile.gettempdir()) / f"nblaunch-{os.getuid()}"
    )
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = root.stat()
    except OSError as error:
        raise LaunchError(
            f"the log folder {root} can't be made: {error.strerror}. Choose another with log_dir= or NBLAUNCH_LOG_DIR."
        ) from error
    if not chosen and (status.st_uid != os.getuid() or root.is_symlink() or not stat.S_ISDIR(status.st_mode)):
        raise LaunchError(
            f"the log folder {root} belongs to somebody else. Choose another with log_dir= or NBLAUNCH_LOG_DIR."
        )
    return root


@dataclass(frozen=True)
class _Mark:
    """What a job's folder carries.

    Args:
        job: name of the folder.
        host: of the kernel.
        pid: of the kernel.
        number: of the job in that kernel.
        made_s: ``time.time()`` of its start.
    """

    job: str
    host: str
    pid: int
    number: int
    made_s: float

    def write(self, folder: Path) -> None:
        """Mark ``folder``."""
        (folder / _MARK).write_text(json.dumps(asdict(self)) + "\n", encoding="utf-8")

    @classmethod
    def of(cls, folder: Path) -> _Mark | None:
        """The mark of a folder that :class:`JobLog` has made, and that is where it was; None of any other."""
        if folder.is_symlink():
            return None
        try:
            # Not through a link, and not from a named pipe, which would never answer.
            fd = os.open(folder / _MARK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            is_ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.getuid()
            text = file.read(_MAX_MARK_BYTES) if is_ours else b""
        try:
            mark = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return None
        is_whole = all(isinstance(value, int) for value in (mark.pid, mark.number)) and mark.pid in range(
            1, 1 << 31
        )
        return mark if is_whole and isinstance(mark.made_s, float) and mark.job == folder.name else None


def _prune(root: Path, keep: int, current: str) -> None:
    """Remove the oldest jobs beyond ``keep`` of this machine, but none that still runs, in whichever process."""
    found = [_Mark.of(root / name) for name in os.listdir(root) if name != current]
    # Whether a process of another machine that shares the folder still runs can't be seen from here.
    marks = [mark for mark in found if mark is not None and mark.host == socket.gethostname()]
    marks.sort(key=lambda mark: (mark.made_s, mark.number))
    for mark in marks[: max(0, len(marks) - (keep - 1))]:
        folder = root / mark.job
        is_over = folder not in _in_use if mark.pid == os.getpid() else not _is_alive(mark.pid)
        if is_over:
            shutil.rmtree(folder, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
