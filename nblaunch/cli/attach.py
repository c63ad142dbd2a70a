"""``nblaunch attach``: output and progress of a detached job in a terminal."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from nblaunch.cli import INTERRUPTED_EXIT_CODE, UsageError
from nblaunch.cli.jobs import add_job_argument, chosen_job
from nblaunch.cli.script_job import exit_code, text_dashboards
from nblaunch.detached.follower import JobFollower
from nblaunch.launcher.requests import interrupts_as_requests

_LOOK_S = 0.1
"""Between two looks for an interrupt: one that another thread was given does not wake this one."""


def add_parser(subparsers: Any) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser(
        "attach",
        help="follow a job that outlives its notebook",
        description="Show all output of a job that was launched with detach=True, from the first line, and its "
        "progress, to its end. Ctrl-C leaves; the job goes on. The exit code is that of the rank that failed first.",
    )
    add_job_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Follow the job, and return the exit code."""
    try:
        follower = JobFollower(chosen_job(arguments), text_dashboards())
    except LookupError as error:
        raise UsageError(str(error)) from None
    interrupts: list[float] = []
    # An exception could be raised where it is lost, as in a finalizer, or while the thread starts.
    with interrupts_as_requests(lambda: interrupts.append(time.monotonic())):
        follower.follow()
        while not (interrupts or follower.wait(_LOOK_S)):
            pass
    if follower.outcome is None:
        print(f"\n{follower.id} goes on; `nblaunch stop {follower.id}` ends it", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE
    failure = follower.outcome.error
    if failure is not None:
        notes = getattr(failure, "__notes__", ())
        print(f"{type(failure).__name__}: {failure}", *notes, sep="\n", file=sys.stderr)
    return exit_code(failure, ())
