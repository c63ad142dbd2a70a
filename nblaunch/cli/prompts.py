"""Prompts: arrow keys in a terminal, lines where answers come through a pipe.

    ? What should compute?                       ? What should compute? 1) CPU 2) GPUs [1]: _
      > CPU (4 cores)
        GPUs
      arrow keys or numbers, then Enter

Owns keys and screen; knows nothing of what is asked.
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
"""Makes a value of what was typed; ValueError says what is wrong with it."""

_ESCAPE_S = 0.05  # within which the rest of an arrow key's sequence follows its first character


class Asker(ABC):
    """One way to ask."""

    @abstractmethod
    def choose(self, question: str, labels: Sequence[str], default: int) -> int:
        """Which of several; returns its place."""

    @abstractmethod
    def enter(self, question: str, default: str, convert: Convert) -> Any:
        """A value that is typed; ``default`` is taken for an empty answer, an empty default makes one necessary."""


def asker() -> Asker:
    """The way that suits this process's input and output."""
    is_screen = sys.stdin.isatty() and sys.stdout.isatty() and env.read("TERM") not in ("", "dumb")
    return ScreenAsker() if is_screen and sys.platform != "win32" else LineAsker(sys.stdin, sys.stdout)


class LineAsker(Asker):
    """One line per answer: a number or the words of a choice, empty for the default.

    In a terminal, a wrong answer is asked for again; a pipe can't correct itself, so there it is an error.
    """

    def __init__(self, source: TextIO, target: TextIO) -> None:
        self._source = source
        self._target = target

    def choose(self, question: str, labels: Sequence[str], default: int) -> int:
        listed = "\n".join(f"  {place}) {label}" for place, label in enumerate(labels, 1))

        def convert(text: str) -> int:
            words = [label.partition(" ")[0].lower() for label in labels]
            if text.lower() in words:
                return words.index(text.lower())
            if text.isdecimal() and 1 <= int(text) <= len(labels):
                return int(text) - 1
            raise ValueError(f"must be a number from 1 to {len(labels)}, or one of {', '.join(words)}")

        return int(self._ask(f"{question}\n{listed}\n", str(default + 1), convert))

    def enter(self, question: str, default: str, convert: Convert) -> Any:
        return self._ask(question, default, convert)

    def _ask(self, question: str, default: str, convert: Convert) -> Any:
        while True:
            print(f"{question}{f' [{default}]' if default else ''}: ", end="", file=self._target, flush=True)
            line = self._source.readline()
            if not self._source.isatty():
                print(line.strip(), file=self._target)  # as a terminal would show it
            if not line:
                raise UsageError(
                    f"the answers ended before this question, and nothing was written: {_first(question)}"
                )
            try:
                return convert(_filled(line.strip(), default))
            except ValueError as error:
                if not self._source.isatty():
                    raise UsageError(
                        f"{_first(question)} {line.strip()!r} {error}; nothing was written"
                    ) from None
                print(f"  {line.strip()!r} {error}", file=self._target)


class ScreenAsker(Asker):
    """Choices by arrow keys or numbers, confirmed by Enter; values are typed as a line."""

    def __init__(self) -> None:
        self._lines = LineAsker(sys.stdin, sys.stdout)

    def enter(self, question: str, default: str, convert: Convert) -> Any:
        return self._lines.enter(f"? {question}", default, convert)

    def choose(self, question: str, labels: Sequence[str], default: int) -> int:
        place = default
        # First of all: an interrupt while modules are imported can be lost (it is raised in a callback of the import).
        with _single_keys():
            print(f"? {question}  (arrow keys or numbers, then Enter)")
            self._draw(labels, place)
            for key in _keys():
                if key == "enter":
                    break
                place = _moved(place, key, len(labels))
                print(f"\x1b[{len(labels)}A", end="")  # the cursor back up to the first choice
                self._draw(labels, place)
        return place

    def _draw(self, labels: Sequence[str], place: int) -> None:
        # A line that wraps would be two on the way up. Some terminals do not know their size.
        width = os.get_terminal_size(sys.stdout.fileno()).columns or 80
        for at, label in enumerate(labels):
            line = f"  {'>' if at == place else ' '} {label}"
            print(f"\r\x1b[2K{line[:width]}")
        sys.stdout.flush()


def _moved(place: int, key: str, count: int) -> int:
    if key in ("up", "down"):
        return (place + (1 if key == "down" else -1)) % count
    return int(key) - 1 if key.isdecimal() and 1 <= int(key) <= count else place


@contextmanager
def _single_keys() -> Iterator[None]:
    """Keys come one by one and are not shown; Ctrl-C still interrupts."""
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
    """``"up"``, ``"down"``, ``"enter"`` and single characters, as they are pressed."""
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
