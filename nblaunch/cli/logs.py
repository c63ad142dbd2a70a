"""``nblaunch logs``: what a rank of a detached job has printed."""

from __future__ import annotations

import argparse
from typing import Any

from nblaunch.cli import UsageError
from nblaunch.cli.jobs import add_job_argument, chosen_job


def add_parser(subparsers: Any) -> None:
    """Add the command and its options."""
    parser = subparsers.add_parser(
        "logs",
        help="print the log of a job that outlives its notebook",
        description="Print all that a rank of a job has printed by now, also of a job that has ended or was lost.",
    )
    add_job_argument(parser)
    parser.add_argument("--rank", type=int, default=0, help="of which rank; default: 0")
    parser.add_argument("--attempt", type=int, help="of which attempt, from 0; default: the last")


def run(arguments: argparse.Namespace) -> int:
    """Print the log, and return the exit code."""
    folder = chosen_job(arguments)
    attempts = folder.attempts()
    attempt = attempts[-1] if arguments.attempt is None and attempts else arguments.attempt
    if attempt not in attempts:
        raise UsageError(
            f"{folder.id} has no attempt {attempt}; it has {', '.join(map(str, attempts)) or 'none yet'}"
        )
    if not folder.log_path(arguments.rank, attempt).exists():
        raise UsageError(f"{folder.id} has no rank {arguments.rank}")
    text = folder.read(arguments.rank, attempt)
    print(text, end="" if text.endswith("\n") or not text else "\n")
    return 0
