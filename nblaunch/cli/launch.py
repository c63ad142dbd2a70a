"""``nblaunch launch script.py``: a script on every device, supervised like a launch from a notebook."""

from __future__ import annotations

import argparse
from typing import Any

from nblaunch.cli.usage import UsageError


def add_parser(subparsers: Any) -> None:
    subparsers.add_parser("launch", help="run a script on every device")


def run(arguments: argparse.Namespace) -> int:
    raise UsageError("not available yet")
