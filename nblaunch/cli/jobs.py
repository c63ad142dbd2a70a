"""``nblaunch jobs``, ``attach``, ``logs`` and ``stop``: jobs that were launched with ``detach=True``."""

from __future__ import annotations

import argparse
import sys
import time
from typing import final

from nblaunch import formatting
from nblaunch.cli import INTERRUPTED_EXIT_CODE, UsageError
from nblaunch.dashboard import text_dashboards
from nblaunch.dashboard.base import Dashboard, GuardedDashboard
from nblaunch.detached import jobs
from nblaunch.detached.folder import JobFolder
from nblaunch.detached.follower import JobFollower, follow
from nblaunch.detached.listing import endpoint_of, find
from nblaunch.detached.requests import TAKEN
from nblaunch.errors import LaunchError
from nblaunch.events import Event, LogLines
from nblaunch.launcher.requests import interrupts_as_requests

_LOOK_S = 0.1
"""Seconds between checks for an interrupt; a signal in another thread would not wake this thread."""


def set_up_jobs(parser: argparse.ArgumentParser) -> None:
    """Set up ``nblaunch jobs``."""
    parser.description = (
        "List your jobs that were launched with detach=True, newest last. The files of the last "
        "NBLAUNCH_KEEP_JOBS jobs are kept. The status `lost` means that the job's process was killed and its workers "
        "ended with it; `waiting`, that the disk has no space for the return value; `damaged`, that some of its files "
        "can't be read; `on NAME`, that the job is running on another machine that shares the folder."
    )
    parser.set_defaults(run=_list)


def set_up_attach(parser: argparse.ArgumentParser) -> None:
    """Set up ``nblaunch attach``."""
    parser.description = (
        "Show the output and the progress of a job that was launched with detach=True, from its start to its end. "
        "Ctrl-C leaves the job running. The exit code is the job's exit code."
    )
    _add_job_argument(parser)
    parser.set_defaults(run=_attach)


def set_up_logs(parser: argparse.ArgumentParser) -> None:
    """Set up ``nblaunch logs``."""
    parser.description = "Print a rank's output so far, or all of it if the job has ended or was lost."
    _add_job_argument(parser)
    parser.add_argument("--rank", type=int, default=0, help="the rank; default: 0")
    parser.add_argument("--attempt", type=int, help="the attempt, counted from 0; default: the last")
    parser.add_argument(
        "-f",
        "--follow",
        action="store_true",
        help="print the output of all attempts, and new output until the job ends; Ctrl-C leaves the job running",
    )
    parser.set_defaults(run=_print_log)


def set_up_stop(parser: argparse.ArgumentParser) -> None:
    """Set up ``nblaunch stop``."""
    parser.description = (
        "Ask a job to stop: accelerator.should_stop becomes true at the same step on every rank. A function that "
        "never checks should_stop keeps running; end such a job with --interrupt or --kill."
    )
    _add_job_argument(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--interrupt", action="store_true", help="interrupt every rank, like the notebook's stop button"
    )
    how.add_argument("--kill", action="store_true", help="kill every rank immediately")
    parser.set_defaults(run=_stop)


def _add_job_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job", nargs="?", help="name from `nblaunch jobs`, or a prefix of it; default: the newest job"
    )


def _chosen_job(arguments: argparse.Namespace) -> JobFolder:
    """Return the folder of the named job; raise UsageError if there is none that this user may use."""
    try:
        return find(arguments.job)
    except (LookupError, PermissionError, LaunchError) as error:
        raise UsageError(str(error.args[0])) from None


def _list(arguments: argparse.Namespace) -> int:
    try:
        records = jobs()
    except (PermissionError, LaunchError) as error:
        raise UsageError(str(error)) from None
    rows = [("job", "status", "ranks", "launched", "time", "logs")]
    rows += [
        (
            record.id,
            record.status,
            f"{record.num_processes} {record.backend}" if record.num_processes else "",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.started_s)),
            formatting.duration(record.duration_s),
            str(record.log_dir),
        )
        for record in records
    ]
    print("\n".join(formatting.columns(rows)))
    for record in records:
        if record.problem:
            print(f"{record.id}: {record.problem}")
    return 0


@final
class _RankOutput(Dashboard):
    """Prints the lines of one rank, without a label."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def on_event(self, event: Event) -> None:
        if isinstance(event, LogLines) and event.rank == self._rank:
            print("\n".join(event.lines), flush=True)


def _follow(folder: JobFolder, dashboards: list[Dashboard]) -> JobFollower:
    """Show a job until it ends or the user interrupts this command.

    The outcome of the returned follower is None if the job is still running.

    Raises:
        UsageError: the job can't be followed from here.
    """
    interrupts: list[float] = []
    # Interrupts are recorded, not raised, because Python could ignore a KeyboardInterrupt, for example in a finalizer,
    # or raise it while the thread is starting.
    with interrupts_as_requests(lambda: interrupts.append(time.monotonic())):
        try:
            follower = follow(folder, dashboards)
        except LookupError as error:
            raise UsageError(str(error)) from None
        while not (interrupts or follower.ends_within(_LOOK_S)):
            pass
    if follower.outcome is None:
        print(f"\n{follower.id} is still running; `nblaunch stop {follower.id}` ends it", file=sys.stderr)
    return follower


def _attach(arguments: argparse.Namespace) -> int:
    from nblaunch.cli.script_job import exit_code

    follower = _follow(_chosen_job(arguments), text_dashboards(shortens=False))
    if follower.outcome is None:
        return INTERRUPTED_EXIT_CODE
    failure = follower.outcome.error
    if failure is not None:
        notes = getattr(failure, "__notes__", ())
        print(f"{type(failure).__name__}: {failure}", *notes, sep="\n", file=sys.stderr)
    return exit_code(failure, ())


def _print_log(arguments: argparse.Namespace) -> int:
    folder = _chosen_job(arguments)
    attempts = folder.attempts()
    attempt = attempts[-1] if arguments.attempt is None and attempts else arguments.attempt
    if attempt not in attempts:
        raise UsageError(
            f"{folder.id} has no attempt {attempt}; it has {', '.join(map(str, attempts)) or 'none yet'}"
        )
    if not folder.log_path(arguments.rank, attempt).exists():
        raise UsageError(f"{folder.id} has no rank {arguments.rank}")
    if arguments.follow:
        follower = _follow(folder, [GuardedDashboard(_RankOutput(arguments.rank))])
        return INTERRUPTED_EXIT_CODE if follower.outcome is None else 0
    text = folder.read(arguments.rank, attempt)
    print(text, end="" if text.endswith("\n") or not text else "\n")
    return 0


def _stop(arguments: argparse.Namespace) -> int:
    folder = _chosen_job(arguments)
    endpoint = endpoint_of(folder)
    if not endpoint.is_served():
        statuses = [record.status for record in jobs() if record.id == folder.id]
        raise UsageError(
            f"{folder.id} can't be stopped from here; its status is {''.join(statuses) or 'unknown'}"
        )
    request = "cancel" if arguments.kill else "interrupt" if arguments.interrupt else "stop"
    reply = endpoint.ask(request)
    if reply != TAKEN:
        raise UsageError(
            f"{folder.id} did not accept the request: {reply or 'its process is not responding'}"
        )
    print(f"request sent to {folder.id}; `nblaunch jobs` shows the job's status")
    return 0
