"""``nblaunch stop``: an early end of a detached job."""

from __future__ import annotations

import argparse
from typing import Any

from nblaunch.cli import UsageError
from nblaunch.cli.jobs import add_job_argument, chosen_job
from nblaunch.detached.requests import RemoteRequests


def add_parser(subparsers: Any) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser(
        "stop",
        help="end a job that outlives its notebook",
        description="Let the training loops of a job end early and well: accelerator.should_stop turns true at the "
        "same step on every rank. A function that never looks at it goes on; see the options.",
    )
    add_job_argument(parser)
    how = parser.add_mutually_exclusive_group()
    how.add_argument(
        "--interrupt", action="store_true", help="interrupt every rank, as the notebook's button does"
    )
    how.add_argument("--kill", action="store_true", help="kill every rank at once")


def run(arguments: argparse.Namespace) -> int:
    """Send the request, and return the exit code."""
    folder = chosen_job(arguments)
    if not folder.has_job_process:
        raise UsageError(f"{folder.id} does not run any more")
    requests = RemoteRequests(folder.path)
    if arguments.kill:
        requests.cancel()
    elif arguments.interrupt:
        requests.interrupt()
    else:
        requests.stop()
    print(f"requested of {folder.id}; `nblaunch jobs` shows its status")
    return 0
