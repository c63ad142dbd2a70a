"""A terminal for tests: a real pseudo-terminal for the program, and an emulator of its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Sequence

_PIECE = re.compile(r"\x1b\[(\d*)([A-Za-z])|(\r\n|\n|\r)|([^\x1b\r\n]+)")


class Emulator:
    """The lines that a terminal shows after some output. It knows the control codes that nblaunch writes, and
    rejects others.
    """

    def __init__(self) -> None:
        self.lines = [""]
        self._row = self._column = 0

    def feed(self, text: str) -> None:
        position = 0
        for piece in _PIECE.finditer(text):
            assert piece.start() == position, f"unknown: {text[position : piece.start()]!r}"
            position = piece.end()
            number, command, end, words = piece.groups()
            if command:
                self._obey(int(number or 1 if command == "F" else number or 0), command)
            elif end:
                self._end_line(end)
            else:
                self._write(words)

    def _obey(self, number: int, command: str) -> None:
        if command == "F":  # up, and to the beginning of the line
            assert number <= self._row, "above the top"
            self._row, self._column = self._row - number, 0
        elif command == "J":  # clear everything below
            self.lines[self._row] = self.lines[self._row][: self._column]
            del self.lines[self._row + 1 :]
        else:
            assert command == "m", f"unknown command {command!r}"

    def _end_line(self, end: str) -> None:
        self._column = 0
        if end != "\r":
            self._row += 1
            if self._row == len(self.lines):
                self.lines.append("")

    def _write(self, words: str) -> None:
        line = self.lines[self._row].ljust(self._column)
        self.lines[self._row] = line[: self._column] + words + line[self._column + len(words) :]
        self._column += len(words)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def run_in_terminal(command: Sequence[str], *, columns: int = 100, rows: int = 30) -> tuple[int, str]:
    """Run a program on a pseudo-terminal; return its exit code and its output."""
    own, its = pty.openpty()
    try:
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        program = subprocess.Popen(
            command, stdin=its, stdout=its, stderr=its, env=environ, start_new_session=True
        )
        os.close(its)
        its = -1
        written = b""
        while True:
            try:
                piece = os.read(own, 65536)
            except OSError:  # Linux reports a closed other side this way
                break
            if not piece:
                break
            written += piece
        return program.wait(30), written.decode()
    finally:
        os.close(own)
        if its >= 0:
            os.close(its)
