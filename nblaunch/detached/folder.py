"""The folder of a detached job: all that is known of it, readable after any crash.

    <log folder>/detached/          mode 0700, of this user; nothing in it is read otherwise
      train-3f9a2c/                 a job's log folder, with what other jobs have (``launcher/joblog.py``), and
        record                      what was launched
        events                      what has happened, appended as it happens: the packets of ``wire/channel.py``; but
                                    lines, which a follower reads from the logs of the ranks, and samples
        snapshot                    the last readings of the board, and the last samples of memory and use of devices;
                                    replaced several times a second
        result, weights             what the ranks returned, and trained weights
        end                         how the job ended
        socket                      for requests, while the job process runs
        job.log                     what the job process printed

Files that are replaced are so in one step, so that none is ever read half. ``events`` ends with
:class:`~nblaunch.events.JobEnded`, behind all other files.
"""

from __future__ import annotations

import os
import pickle
import socket
import stat
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import IO, Any, TypeVar

from nblaunch import formatting
from nblaunch.detached.requests import is_served
from nblaunch.events import Event, Failed, JobEnded
from nblaunch.host import descriptors
from nblaunch.launcher.joblog import LogFolder, log_root
from nblaunch.spec import LaunchSpec
from nblaunch.wire.board import SlotReading

_RETRY_S = 0.1

_Stored = TypeVar("_Stored", "Record", "Snapshot", "End")


@dataclass(frozen=True)
class Record:
    """What was launched, and by which process it is supervised.

    Args:
        spec: without the function and its arguments.
        backend: name of the device family.
        registered_backend: it, pickled, where it is not part of nblaunch.
        plan: the settings of the :class:`nblaunch.launcher.plan.LaunchPlan` of the launching process.
        sources: file name -> text of the notebook's cells, for tracebacks.
        host: name of this machine.
        pid: of the job process.
        started_s: ``time.time()`` of the launch.
    """

    spec: LaunchSpec
    backend: str
    registered_backend: bytes
    plan: Mapping[str, Any]
    sources: Mapping[str, str]
    host: str
    pid: int = 0
    started_s: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """The present state of all ranks.

    Args:
        samples: the last event of each kind and rank that is sampled: memory, utilisation of devices.
    """

    time_s: float
    readings: Sequence[SlotReading]
    samples: Sequence[Event]


@dataclass(frozen=True)
class End:
    """How a job ended.

    Args:
        event: its last event.
        failed: the error, with its text and frames as IPython shows it; None if there is none.
        notes: of an error that is shown as that of a worker; None = as any error of the launcher.
        unsaved: why the result could not be written; empty if it was.
        unsaved_weights: the same of trained weights.
        partial_rank: the rank whose value is the ``partial`` of the error; None where the error has none.
    """

    event: JobEnded
    failed: Failed | None
    notes: Sequence[str] | None
    unsaved: str
    unsaved_weights: str
    partial_rank: int | None


@dataclass(frozen=True)
class JobSummary:
    """One line of the list of jobs.

    Args:
        id: short name, for :func:`nblaunch.attach`.
        function_name: of the user's function.
        status: as of :class:`nblaunch.Job`; ``"other version"`` where the job was launched by another version of
            nblaunch, whose files this one can't read.
        num_processes: number of ranks; 0 where that can't be read.
        backend: device family.
        started_s: ``time.time()`` of the launch.
        duration_s: seconds that it ran, or has run by now.
        log_dir: folder with its logs.
    """

    id: str
    function_name: str
    status: str
    num_processes: int
    backend: str
    started_s: float
    duration_s: float
    log_dir: Path

    def __repr__(self) -> str:
        ranks = f" on {formatting.count(self.num_processes, f'{self.backend} worker')}" * bool(
            self.num_processes
        )
        return (
            f"<{self.id}: {self.function_name}{ranks}, {self.status}, {formatting.duration(self.duration_s)}>"
        )


class JobFolder(LogFolder):
    """The folder of one detached job.

    Attributes:
        id: short name of the job.
        events_path: the file of events.
        result_path: the file of what the ranks returned.
        weights_path: the file of trained weights, if there are any.

    Raises:
        PermissionError: other users can change it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        check_private(path)
        self.id = path.name
        self.events_path = path / "events"
        self.result_path = path / "result"
        self.weights_path = path / "weights"

    @property
    def has_job_process(self) -> bool:
        """Whether the job process runs."""
        return is_served(self.path)

    def load(self, kind: type[_Stored], *, is_patient: bool = False) -> _Stored | None:
        """Return what the file of this kind of value holds; None if it was not written yet.

        Args:
            is_patient: wait while this process has no descriptor left to open it with.

        Raises:
            LookupError: it is of another version of nblaunch.
        """
        data = None
        while data is None:
            try:
                data = (self.path / kind.__name__.lower()).read_bytes()
            except FileNotFoundError:
                return None
            except OSError as error:
                if not (is_patient and descriptors.have_run_out(error)):
                    raise
                time.sleep(_RETRY_S)
        try:
            value = pickle.loads(data)
        except (ImportError, AttributeError, TypeError):  # a module or class that this version does not have
            value = None
        if isinstance(value, kind) and all(hasattr(value, field.name) for field in fields(kind)):
            return value
        raise LookupError(
            f"{self.id} was launched by another version of nblaunch, which can attach to it; this one can only end it: "
            f"`nblaunch stop {self.id}`. Logs: {self.path}"
        )

    def write(self, value: Record | Snapshot | End) -> None:
        """Replace the file of this kind of value."""
        name = type(value).__name__.lower()
        self.replace(self.path / name, lambda file: file.write(pickle.dumps(value)))

    def replace(self, path: Path, write: Callable[[IO[bytes]], object]) -> None:
        """Replace a file of the folder in one step.

        Raises:
            OSError: the disk is full, for example; the file is as it was.
        """
        new = path.with_name(f"{path.name}.new")
        try:
            with open(os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "w+b") as file:
                write(file)
            new.replace(path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise

    def summary(self) -> JobSummary | None:
        """Return the line of the list of jobs; None of a folder without a job of this machine."""
        has_job_process = self.has_job_process  # first: what it writes at its end is there when it has gone
        try:
            record, end, snapshot = self.load(Record), self.load(End), self.load(Snapshot)
        except LookupError:
            name, launched_s = self.id.rpartition("-")[0], self.path.stat().st_ctime
            return JobSummary(self.id, name, "other version", 0, "", launched_s, 0.0, self.path)
        if record is None or record.host != socket.gethostname():
            return None
        running = "starting" if snapshot is None else "running"
        if end is not None:
            until_s = end.event.time_s
        else:
            until_s = time.time() if has_job_process or snapshot is None else snapshot.time_s
        return JobSummary(
            id=self.id,
            function_name=record.spec.function_name,
            status=end.event.outcome if end else running if has_job_process else "lost",
            num_processes=record.plan["num_processes"],
            backend=record.backend,
            started_s=record.started_s,
            duration_s=max(0.0, until_s - record.started_s),
            log_dir=self.path,
        )


def root() -> Path:
    """Return the folder of the detached jobs of this user, which is made if it is not there.

    Raises:
        LaunchError: it can't be made.
        PermissionError: other users can change it.
    """
    path = log_root() / "detached"
    path.mkdir(mode=0o700, exist_ok=True)
    check_private(path)
    return path


def check_private(path: Path) -> None:
    """Check that only this user can have written what is in a folder: parts of it are pickles.

    Raises:
        PermissionError: others can, or could.
        FileNotFoundError: it does not exist.
    """
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        problem, remedy = "is no folder of this user", "Choose another place for jobs with NBLAUNCH_LOG_DIR."
    elif status.st_mode & 0o077:
        problem = f"is open to other users (mode {stat.S_IMODE(status.st_mode):04o})"
        remedy = f"If only you have written to it: chmod 700 {path}"
    else:
        return
    raise PermissionError(
        f"{path} {problem}, and nothing in it was read: jobs are private to their user. {remedy}"
    )


def jobs() -> list[JobSummary]:
    """Return the jobs of this user on this machine that were launched with ``detach=True``, the newest last.

    The files of ended jobs are kept as logs are, up to ``NBLAUNCH_KEEP_JOBS``.

    Raises:
        PermissionError: the folder of the jobs can be changed by other users.
    """
    summaries = []
    for path in filter(Path.is_dir, root().iterdir()):
        with suppress(FileNotFoundError):  # another process prunes it at the same time
            summaries.append(JobFolder(path).summary())
    return sorted((one for one in summaries if one is not None), key=lambda one: one.started_s)


def find(job_id: str | None) -> JobFolder:
    """Return the folder of a job.

    Args:
        job_id: its name, or the beginning of it; None = the newest.

    Raises:
        LookupError: there is no such job, or several have names that begin so.
        PermissionError: other users can change the folder.
    """
    known = jobs()
    found = [one for one in known if job_id is None or one.id.startswith(job_id)]
    exact = [one for one in found if one.id == job_id] or (found[-1:] if job_id is None else found)
    if len(exact) == 1:
        return JobFolder(exact[0].log_dir)
    listed = ", ".join(one.id for one in found or known) or "none"
    problem = (
        f"{job_id!r} is the beginning of several jobs" if found else f"there is no job {job_id or 'at all'}"
    )
    raise LookupError(
        f"{problem}; in {root()}: {listed}. Jobs are listed if they were launched with detach=True"
    )
