"""Prompts for answers: arrow keys in a terminal, lines through a pipe.

? What should compute?                       ? What should compute? 1) CPU 2) GPUs [1]: _
  > CPU (4 cores)
    GPUs
  arrow keys or numbers, then Enter

"""

from __future__ import annotations

import os
import select
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from nblaunch import env
from nblaunch.cli import UsageError

Convert = Callable[[str], Any]
"""Converts typed text to a value; raises ValueError with the reason if it is invalid."""

_ESCAPE_S = 0.05  # seconds in which the rest of an arrow key's escape sequence follows


class Asker(ABC):
    """An interface for questions."""

    @abstractmethod
    def choose(self, question: str, labels: Sequence[str], default: int) -> int:
        """Ask for one of several choices; return its index."""

    @abstractmethod
    def enter(self, question: str, default: str, convert: Convert) -> Any:
        """Ask for a typed value; an empty answer means ``default``, and is refused if that is empty."""


def asker() -> Asker:
    """Return the asker for this process's standard input and output."""
    is_screen = sys.stdin.isatty() and sys.stdout.isatty() and env.read("TERM") not in ("", "dumb")
    return ScreenAsker() if is_screen and sys.platform != "win32" else LineAsker(sys.stdin, sys.stdout)


class LineAsker(Asker):
    """Asks for one line per answer: a number or the first word of a choice, empty for the default.

    A question is repeated after an invalid answer. Where the lines of a pipe end before a valid one, that is an error.
    """

    def __init__(self, source: TextIO, target: TextIO) -> None:
        self._source = source
        self._target = target

    def choose(self, question: str, labels: Sequence[str], default: int) -> int:
        listed = "\n".join(f"  {number}) {label}" for number, label in enumerate(labels, 1))

        def convert(text: str) -> int:
            names = [label.partition(" ")[0].rstrip(":").lower() for label in labels]
            if text.lower() in names:
                return names.index(text.lower())
            if text.isdecimal() and 1 <= int(text) <= len(labels):
                return int(text) - 1
            raise ValueError(f"must be a number from 1 to {len(labels)}, or one of {', '.join(names)}")

        return int(self._ask(f"{question}\n{listed}\n", str(default + 1), convert))

    def enter(self, question: str, default: str, convert: Convert) -> Any:
        return self._ask(question, default, convert)

    def _ask(self, question: str, default: str, convert: Convert) -> Any:
        refusal = ""
        while True:
            print(f"{question}{f' [{default}]' if default else ''}: ", end="", file=self._target, flush=True)
            line = self._source.readline()
            if not self._source.isatty():
                print(line.strip(), file=self._target)  # as a terminal would show it
            if not line:
                raise UsageError(
                    f"the answers ended before this question, and nothing was written: {_first(question)}{refusal}"
                )
            try:
                return convert(_filled(line.strip(), default))
            except ValueError as error:
                refusal = f" ({line.strip()!r} {error})"
                print(f"  {line.strip()!r} {error}", file=self._target)


class ScreenAsker(Asker):
    """Asks for choices by arrow keys or numbers and Enter; values are typed as a line."""

    def __init__(self) -> None:
        self._lines = LineAsker(sys.stdin, sys.stdout)

    def enter(self, question: str, default: str, convert: Convert) -> Any:
        return self._lines.enter(f"? {question}", default, convert)

    def choose(self, question: str, labels: Sequence[str], default: int) -> int:
        index = default
        # First, because an interrupt during the imports in there can be lost (it is raised in a callback).
        with _single_keys():
            print(f"? {question}  (arrow keys or numbers, then Enter)")
            self._draw(labels, index)
            for key in _keys():
                if key == "enter":
                    break
                index = _moved(index, key, len(labels))
                print(f"\x1b[{len(labels)}A", end="")  # the cursor back up to the first choice
                self._draw(labels, index)
        return index

    def _draw(self, labels: Sequence[str], index: int) -> None:
        # Lines must not wrap, or the cursor would move up too few. Some terminals do not know their size.
        width = os.get_terminal_size(sys.stdout.fileno()).columns or 80
        for i, label in enumerate(labels):
            line = f"  {'>' if i == index else ' '} {label}"
            print(f"\r\x1b[2K{line[:width]}")
        sys.stdout.flush()


def _moved(index: int, key: str, count: int) -> int:
    if key in ("up", "down"):
        return (index + (1 if key == "down" else -1)) % count
    return int(key) - 1 if key.isdecimal() and 1 <= int(key) <= count else index


@contextmanager
def _single_keys() -> Iterator[None]:
    """Read single keys without echo while the block runs; Ctrl-C still interrupts."""
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _keys() -> Iterator[str]:
    """Yield pressed keys: ``"up"``, ``"down"``, ``"enter"`` and single characters."""
    fd = sys.stdin.fileno()
    arrows = {b"A": "up", b"B": "down"}
    while True:
        key = os.read(fd, 1)
        if not key:
            raise UsageError("the terminal was closed; nothing was written")
        if key in (b"\n", b"\r"):
            yield "enter"
        elif key in (b"k", b"j"):
            yield "up" if key == b"k" else "down"
        elif key != b"\x1b":
            yield key.decode("latin-1")
        elif select.select([fd], [], [], _ESCAPE_S)[0] and os.read(fd, 1) in (b"[", b"O"):
            yield arrows.get(os.read(fd, 1), "")


def _filled(text: str, default: str) -> str:
    if not text and not default:
        raise ValueError("must not be empty")
    return text or default


def _first(question: str) -> str:
    return question.partition("\n")[0].removeprefix("? ")
