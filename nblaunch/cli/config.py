"""``nblaunch config``: a few questions, whose answers are the defaults of later launches."""

from __future__ import annotations

import argparse
from typing import Any

from nblaunch.cli.usage import UsageError


def add_parser(subparsers: Any) -> None:
    subparsers.add_parser("config", help="answer a few questions and write the defaults of `nblaunch launch`")


def run(arguments: argparse.Namespace) -> int:
    raise UsageError("not available yet")
