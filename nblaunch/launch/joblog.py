"""What workers print, on disk: one folder a job, one file a rank and attempt.

    <log folder, mode 0700>/
      20261120-153000-4242-1/          one job: time, process id of the kernel, number in that kernel
        attempt_0/
          rank_0.log                   everything that rank 0 printed
          rank_0.message                 text of its exception, where that is too long to be shown
          rank_0.stacks                stacks that faulthandler wrote, after a crash or on request

Files of ended jobs stay, so that what was printed before any crash can be read; the oldest jobs are pruned.
"""

from __future__ import annotations

import itertools
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from nblaunch import env
from nblaunch.errors import LaunchError

_job_numbers = itertools.count(1)
_PRUNE_EVERY = 20
"""jobs of a kernel. Most prune once their workers run; those that are over before that must not pile up."""

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
        try:
            self.path.mkdir(mode=0o700)
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


def _prune(root: Path, keep: int, current: str) -> None:
    """Remove the oldest jobs beyond ``keep``, but none that still runs, and none of another process that does."""
    names = [name for name in os.listdir(root) if name != current and _pid_of(name) is not None]
    # By numbers: job 10 is younger than job 9.
    jobs = sorted(names, key=lambda name: [int(part) for part in name.split("-")])
    for name in jobs[: max(0, len(jobs) - (keep - 1))]:
        pid = _pid_of(name)
        is_over = root / name not in _in_use if pid == os.getpid() else not _is_alive(pid or 0)
        if is_over:
            shutil.rmtree(root / name, ignore_errors=True)


def _pid_of(job_name: str) -> int | None:
    parts = job_name.split("-")
    return int(parts[2]) if len(parts) == 4 and all(part.isdigit() for part in parts) else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
