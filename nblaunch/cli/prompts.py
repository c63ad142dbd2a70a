"""Prompts for answers, a line each, in a terminal and through a pipe: number or first word of a choice, or a value.

What should compute?
  1) CPU (4 cores)
  2) GPUs
[1]: _
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from nblaunch.cli import UsageError

Convert = Callable[[str], Any]
"""Converts typed text to a value; raises ValueError with the reason if it is invalid."""


class Asker:
    """Asks for one line per answer on standard output and input; an empty line means the default.

    A question is repeated after an invalid answer. Where the lines of a pipe end before a valid one, that is an error.
    """

    def choose(self, question: str, labels: Sequence[str], default: int) -> int:
        """Ask for one of several choices; return its index."""
        listed = "\n".join(f"  {number}) {label}" for number, label in enumerate(labels, 1))

        def convert(text: str) -> int:
            names = [label.partition(" ")[0].rstrip(":").lower() for label in labels]
            if text.lower() in names:
                return names.index(text.lower())
            if text.isdecimal() and 1 <= int(text) <= len(labels):
                return int(text) - 1
            raise ValueError(f"must be a number from 1 to {len(labels)}, or one of {', '.join(names)}")

        return int(self.enter(f"{question}\n{listed}\n", str(default + 1), convert))

    def enter(self, question: str, default: str, convert: Convert) -> Any:
        """Ask for a typed value; an empty answer means ``default``, and is refused if that is empty."""
        refusal = ""
        while True:
            print(f"{question}{f' [{default}]' if default else ''}: ", end="", flush=True)
            line = sys.stdin.readline()
            if not sys.stdin.isatty():
                print(line.strip())  # as a terminal would show it
            if not line:
                first = question.partition("\n")[0]
                raise UsageError(
                    f"the answers ended before this question, and nothing was written: {first}{refusal}"
                )
            try:
                return convert(_filled(line.strip(), default))
            except ValueError as error:
                refusal = f" ({line.strip()!r} {error})"
                print(f"  {line.strip()!r} {error}")


def _filled(text: str, default: str) -> str:
    if not text and not default:
        raise ValueError("must not be empty")
    return text or default
