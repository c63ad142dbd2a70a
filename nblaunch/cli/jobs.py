"""``nblaunch jobs``: the detached jobs of this user on this machine; and the choice of one for the other commands."""

from __future__ import annotations

import argparse
import time
from typing import Any

from nblaunch import formatting
from nblaunch.cli import UsageError
from nblaunch.detached import jobs
from nblaunch.detached.folder import JobFolder, find


def add_parser(subparsers: Any) -> None:
    """Add the command and its options."""
    subparsers.add_parser(
        "jobs",
        help="list the jobs that outlive their notebook",
        description="List the jobs of this user on this machine that were launched with detach=True, the newest last. "
        "The files of ended jobs are kept as logs are, up to NBLAUNCH_KEEP_JOBS. Status lost: the process that watched "
        "the job was killed, and its workers with it.",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the list, and return the exit code."""
    try:
        found = jobs()
    except PermissionError as error:
        raise UsageError(str(error)) from None
    rows = [("job", "status", "ranks", "launched", "time", "logs")]
    rows += [
        (
            one.id,
            one.status,
            f"{one.num_processes} {one.backend}" if one.num_processes else "",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.started_s)),
            formatting.duration(one.duration_s),
            str(one.log_dir),
        )
        for one in found
    ]
    print("\n".join(formatting.columns(rows)))
    return 0


def add_job_argument(parser: argparse.ArgumentParser) -> None:
    """Let a command take the name of a job."""
    parser.add_argument(
        "job", nargs="?", help="as listed by `nblaunch jobs`, or its beginning; default: the newest"
    )


def chosen_job(arguments: argparse.Namespace) -> JobFolder:
    """Return the folder of the job that was named.

    Raises:
        UsageError: there is none, or its folder is not private to the user.
    """
    try:
        return find(arguments.job)
    except (LookupError, PermissionError) as error:
        raise UsageError(str(error.args[0])) from None
