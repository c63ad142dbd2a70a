"""Lists this user's detached jobs, from their folders and from processes whose folders are gone."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from nblaunch import formatting
from nblaunch.detached.folder import JobFolder, Unusable, own_layout, present_homes, private_problem
from nblaunch.detached.record import End, Head, Record
from nblaunch.detached.requests import Endpoint, served_addresses
from nblaunch.host import files
from nblaunch.host.machine import ProcessState
from nblaunch.wire import schema

T = TypeVar("T")
U = TypeVar("U")

_PATIENCE_S = 1.0
"""How long to wait for replies from job processes, which may be busy or stopped. They are asked in parallel."""

_MAX_ASKED = 32
"""Number of job processes that are queried at the same time."""

OTHER_LAYOUT = "its events have different fields"
KILLED = "its process was killed"
RESTARTED = "the machine was restarted"


@dataclass(frozen=True)
class Served:
    """A job process's description of itself.

    Args:
        folder: folder of the job.
        problem: why removed files can't be restored; empty = all files exist.
        waits_for: why the process is waiting before it ends; empty if it is not waiting.
        record: record of the job; None = it is from another version of nblaunch.
    """

    folder: str
    problem: str
    waits_for: str
    record: Record | None


@dataclass(frozen=True)
class JobSummary:
    """One line in the list of jobs.

    Args:
        id: short name, for :func:`nblaunch.attach`.
        function_name: name of the user's function.
        status: as in :class:`nblaunch.Job`; ``"on NAME"`` if it runs on another machine that shares the folder;
            ``"damaged"`` if its files can't be read; ``"other version"`` if it has ended, and was launched by another
            version of nblaunch whose record this version can't read.
        num_processes: number of ranks; 0 = unknown.
        backend: device family.
        started_s: ``time.time()`` of the launch.
        duration_s: seconds that it ran, or has run so far.
        log_dir: folder with its logs.
        problem: why a job was lost, what is wrong with a damaged job, which version launched it if this one can't
            attach, or what the job is waiting for; empty = nothing.
        can_attach: whether :func:`nblaunch.attach` can follow it from here.
    """

    id: str
    function_name: str
    status: str
    num_processes: int
    backend: str
    started_s: float
    duration_s: float
    log_dir: Path
    problem: str = ""
    can_attach: bool = True

    def __repr__(self) -> str:
        ranks = f" on {formatting.count(self.num_processes, f'{self.backend} worker')}" * bool(
            self.num_processes
        )
        problem = f" ({self.problem})" if self.problem else ""
        return (
            f"<{self.id}: {self.function_name}{ranks}, {self.status}{problem}, "
            f"{formatting.duration(self.duration_s)}>"
        )


def jobs() -> list[JobSummary]:
    """Return this user's jobs that were launched with ``detach=True``, the newest last.

    The list contains the jobs on this machine and on other machines that share the folder. The files of the last
    ``NBLAUNCH_KEEP_JOBS`` jobs are kept. A job with damaged files is listed with the reason.

    Raises:
        PermissionError: other users can access the jobs' folder.
    """
    homes = present_homes()
    looks = _at_once(_look_at, _folders(homes))
    listed, records = [summary for summary, _ in looks], [record for _, record in looks]
    addresses = {record.address for record in records if record is not None}
    # A job that is restoring its files looks damaged, but replies.
    by_folder = {
        summary.log_dir: summary
        for summary in [*listed, *_without_folder(homes, addresses)]
        if summary is not None
    }
    return sorted(by_folder.values(), key=lambda summary: summary.started_s)


def find(job_id: str | None) -> JobFolder:
    """Return the folder of a job.

    Args:
        job_id: its name, or a prefix of it; None = the newest job that can be attached to.

    Raises:
        LookupError: there is no such job, or several jobs match.
        PermissionError: other users can change the folder.
    """
    all_jobs = jobs()
    if job_id is None:
        usable = [job for job in all_jobs if job.can_attach]
        chosen, matching = (usable or all_jobs)[-1:], all_jobs
    else:
        matching = [job for job in all_jobs if job.id.startswith(job_id)]
        chosen = [job for job in matching if job.id == job_id] or matching
    if len(chosen) == 1:
        return JobFolder(chosen[0].log_dir)
    names = formatting.joined([job.id for job in matching or all_jobs])
    where = f"in {formatting.joined([*map(str, present_homes())])}"
    if matching:
        problem = f"{job_id!r} is a prefix of several jobs {where}: {names}"
    else:
        problem = (
            f"there is no job {job_id!r} {where}, only {names}"
            if names and job_id
            else f"there is no job {where}"
        )
    raise LookupError(f"{problem}. Only jobs launched with detach=True are listed")


def ask(endpoint: Endpoint, timeout_s: float = _PATIENCE_S) -> Served | None:
    """Ask a job process of any version to describe itself; return None if it does not reply.

    Before it answers, the process restores any files that were removed from its folder.
    """
    text = endpoint.ask("describe", timeout_s)
    with suppress(ValueError):
        return schema.load(Served, text.encode())
    try:  # all versions reply with these two fields
        plain = json.loads(text)
        return Served(str(plain["folder"]), str(plain.get("problem", "")), "", None)
    except (ValueError, KeyError, TypeError):  # there is no reply
        return None


def _folders(homes: Collection[Path]) -> list[JobFolder]:
    folders = []
    for place in homes:
        try:
            with files.private_folder(place) as fd:
                folders += [JobFolder(place / entry) for entry in _subfolders(fd)]
        except FileNotFoundError:
            continue
        except PermissionError as error:
            raise private_problem(place, error) from None
    return folders


def _subfolders(folder_fd: int) -> list[str]:
    with os.scandir(folder_fd) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))


def _at_once(look: Callable[[T], U], places: Sequence[T]) -> list[U]:
    """Return ``look(place)`` for all places; the calls run in parallel, because some take a while."""
    if not places:
        return []
    with ThreadPoolExecutor(min(len(places), _MAX_ASKED), "nblaunch-jobs") as pool:
        return list(pool.map(look, places))


def _look_at(folder: JobFolder) -> tuple[JobSummary | None, Record | None]:
    """Return a job's line and its record; each is None if it is missing."""
    with suppress(FileNotFoundError):  # another process may prune the folder at the same time
        return _look_into(folder)
    return None, None


def _look_into(folder: JobFolder) -> tuple[JobSummary | None, Record | None]:
    record = None
    try:
        record = folder.load_record()
        state = folder.process_state(record)  # read first: if the process has ended, all files exist
        return _line_of(folder, record, state, folder.load_end()), record
    except Unusable as error:
        status, reason = error.status, error.reason
        if status == "other version":
            runs = folder.process_state(error.head) is ProcessState.RUNS
            status, reason = "running" if runs else status, _only_by(error.head, reason)
        return _line_without_record(folder.path, status, reason, folder.path.stat().st_ctime), record
    except LookupError:
        return None, None  # not a job's folder
    except FileNotFoundError:
        raise
    except OSError as error:
        return _line_without_record(folder.path, "damaged", str(error), folder.path.stat().st_ctime), record


def _only_by(head: Head, reason: str) -> str:
    return f"launched by {head.launcher}, which can attach to it: {reason}"


def _line_without_record(path: Path, status: str, problem: str, started_s: float) -> JobSummary:
    name = path.name.rpartition("-")[0]
    return JobSummary(path.name, name, status, 0, "", started_s, 0.0, path, problem, False)


def _line_of(folder: JobFolder, record: Record, state: ProcessState, end: End | None) -> JobSummary:
    snapshot = folder.modified("snapshot")
    problem, until_s = "", time.time()
    if end is not None:
        status, until_s = end.event.outcome, end.event.time_s
    elif state is ProcessState.ELSEWHERE:
        status = f"on {record.process.machine.name}"
    elif state is ProcessState.RUNS:
        served = ask(Endpoint(folder.path, record.address))
        problem = served.waits_for if served is not None else ""
        status = "waiting" if problem else "running" if snapshot is not None else "starting"
    else:
        status = "lost"
        problem = RESTARTED if state is ProcessState.RESTARTED else KILLED
        until_s = record.started_s if snapshot is None else snapshot[1] / 1e9
    can_attach = state is not ProcessState.ELSEWHERE or end is not None
    if record.layout != own_layout():
        problem = "; ".join(filter(None, (problem, _only_by(record.head, OTHER_LAYOUT))))
        can_attach = False
    return replace(_summary(folder.path, record, status, until_s, problem), can_attach=can_attach)


def _summary(path: Path, record: Record, status: str, until_s: float, problem: str) -> JobSummary:
    return JobSummary(
        id=record.id,
        function_name=record.function_name,
        status=status,
        num_processes=record.num_processes,
        backend=record.backend,
        started_s=record.started_s,
        duration_s=max(0.0, until_s - record.started_s),
        log_dir=path,
        problem=problem,
    )


def _without_folder(homes: Collection[Path], listed: Collection[str]) -> list[JobSummary]:
    """Return the lines of jobs that are running although their folders were removed. The jobs restore them when asked.

    Args:
        homes: folders of jobs.
        listed: addresses of jobs whose folders exist.
    """
    lines = []
    for folder, (_, served) in _served(listed).items():
        if folder.parent not in homes:
            continue
        if served.problem:
            lines.append(_unrestored_line(folder, served))
            continue
        summary, _ = _look_at(JobFolder(folder))
        if summary is not None:
            lines.append(summary)
    return lines


def _unrestored_line(folder: Path, served: Served) -> JobSummary:
    problem = f"its folder was removed and can't be restored: {served.problem}"
    if served.record is not None:
        return _summary(folder, served.record, "running", time.time(), problem)
    problem = f"{problem}; launched by another version of nblaunch"
    return _line_without_record(folder, "running", problem, time.time())


def _served(skipped: Collection[str] = ()) -> dict[Path, tuple[str, Served]]:
    """Return the addresses and the descriptions of this user's job processes, by folder.

    Args:
        skipped: addresses of processes that are not asked.
    """
    addresses = [address for address in served_addresses() if address not in skipped]
    replies = _at_once(lambda address: ask(Endpoint(Path("/nonexistent"), address)), addresses)
    return {
        Path(served.folder): (address, served)
        for address, served in zip(addresses, replies, strict=True)
        if served is not None
    }


def endpoint_of(folder: JobFolder) -> Endpoint:
    """Return the endpoint of a job's process, even if the record is damaged or the folder was removed."""
    try:
        return Endpoint(folder.path, folder.load_record().address)
    except Unusable as error:
        address = error.head.address
    except (LookupError, OSError):  # there is no folder, or another file has its name
        address = ""
    if not address:
        address, _ = _served().get(folder.path, ("", None))
    return Endpoint(folder.path, address)
