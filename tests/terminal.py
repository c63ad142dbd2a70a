"""A terminal for tests: a real pseudo-terminal for the program, and an emulator of its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence

TIMEOUT_S = 180.0


class Emulator:
    """A terminal's screen that understands the control codes that rich writes and rejects all others."""

    def __init__(self) -> None:
        self.lines = [""]
        self.num_controls = 0
        self.colours: set[int] = set()
        self.is_cursor_hidden = False
        self._row = self._column = 0
        self._rest = ""

    def write(self, text: str) -> None:
        text = self._rest + text
        cut_short = re.search(r"\x1b(\[[\d;?]*)?$", text)
        self._rest = cut_short[0] if cut_short else ""
        for part in re.findall(r"\x1b\[\??[\d;]*[A-Za-z]|[^\x1b]", text.removesuffix(self._rest)):
            if part.startswith("\x1b["):
                self.num_controls += 1
                self._control(part[2:-1], part[-1])
            elif part == "\r":
                self._column = 0
            elif part == "\n":
                self._row, self._column = self._row + 1, 0
                self.lines += [""] * (self._row + 1 - len(self.lines))
            else:
                line = self.lines[self._row].ljust(self._column)
                self.lines[self._row] = line[: self._column] + part + line[self._column + 1 :]
                self._column += 1

    def _control(self, arguments: str, name: str) -> None:
        if name == "A":
            self._row -= int(arguments or 1)
            assert self._row >= 0
        elif name == "K":
            assert arguments == "2"
            self.lines[self._row] = ""
        elif name == "m":
            self.colours |= {int(number) for number in arguments.split(";") if number}
        else:
            assert arguments in ("?25", "?2004"), (arguments, name)  # readline writes the latter
            if arguments == "?25":
                self.is_cursor_hidden = name == "l"

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines).rstrip("\n")


def run_in_terminal(
    command: Sequence[str],
    *,
    columns: int = 100,
    rows: int = 30,
    answers: Sequence[tuple[str, str]] = (),
    term: str = "xterm",
) -> tuple[int, str]:
    """Run a program on a pseudo-terminal; return its exit code and its output, including what was typed.

    Args:
        command: the program.
        columns: width of the terminal.
        rows: height of the terminal.
        answers: (end of the prompt, line to type); each is typed once its prompt is the last output.
        term: type of the terminal.
    """
    left = list(answers)
    own, its = pty.openpty()
    try:
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        environ["TERM"] = term
        program = subprocess.Popen(
            command, stdin=its, stdout=its, stderr=its, env=environ, start_new_session=True
        )
        os.close(its)
        its = -1
        written, deadline = b"", time.monotonic() + TIMEOUT_S
        while True:
            if not select.select([own], [], [], max(0.0, deadline - time.monotonic()))[0]:
                program.kill()
                raise AssertionError(f"the program did not end within {TIMEOUT_S:g} s:\n{written.decode()}")
            try:
                piece = os.read(own, 65536)
            except OSError:  # Linux reports a closed other side this way
                break
            if not piece:
                break
            written += piece
            if left and written.endswith(left[0][0].encode()):
                os.write(own, f"{left.pop(0)[1]}\n".encode())
        return program.wait(180), written.decode()
    finally:
        os.close(own)
        if its >= 0:
            os.close(its)
