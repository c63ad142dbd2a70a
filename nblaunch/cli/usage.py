"""Wrong uses of a command: one line that says what is wrong and what to do, and exit code 2."""

from __future__ import annotations

import argparse
from typing import NoReturn


class UsageError(Exception):
    """The command can't do what it was asked for; nothing was started. The message says why, and what to do."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage before it; the help is there for who wants it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")
