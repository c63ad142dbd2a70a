"""``nblaunch jobs``: the detached jobs of this user on this machine."""

from __future__ import annotations

import argparse
import time
from typing import Any

from nblaunch import formatting
from nblaunch.cli import UsageError
from nblaunch.detached import jobs


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
            f"{one.num_processes} {one.backend}",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.started_s)),
            formatting.duration(one.duration_s),
            str(one.log_dir),
        )
        for one in found
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0
