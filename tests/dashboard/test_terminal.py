"""The line that is redrawn in a terminal: on a real pseudo-terminal, seen through a screen that keeps what it shows."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nblaunch.dashboard.lines import LinesPrinter
from nblaunch.dashboard.text import LiveLine, TextDashboard, columns_of, cut
from nblaunch.events import LogLines
from tests.dashboard.scenes import START_S, Clock, ended, sample, started

ROOT = Path(__file__).parents[2]
COLUMNS = 100

SCRIPT = """
import time
from nblaunch import Accelerator, notebook_launcher

def train():
    accelerator = Accelerator()
    for step in accelerator.progress(range(40)):
        if step % 10 == 0:
            print("at", step)
        time.sleep(0.04)

notebook_launcher(train, num_processes=2, backend="cpu")
"""


class Screen:
    """What a terminal shows of what is written: carriage returns go back, and later characters replace earlier ones."""

    def __init__(self) -> None:
        self.lines = [""]
        self._column = 0
        self.snapshots: list[str] = []

    def write(self, text: str) -> None:
        for one in text:
            if one == "\r":
                self.snapshots.append(self.lines[-1].rstrip())
                self._column = 0
            elif one == "\n":
                self.lines.append("")
                self._column = 0
            else:
                line = self.lines[-1]
                self.lines[-1] = line[: self._column] + one + line[self._column + 1 :]
                self._column += 1

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)


@contextmanager
def terminal() -> Iterator[tuple[int, io.TextIOWrapper]]:
    """A pseudo-terminal: the end that a user looks at, and a stream into the other one."""
    user, program = pty.openpty()
    fcntl.ioctl(program, termios.TIOCSWINSZ, struct.pack("HHHH", 30, COLUMNS, 0, 0))
    stream = io.TextIOWrapper(io.FileIO(program, "w"), encoding="utf-8", write_through=True)
    try:
        yield user, stream
    finally:
        stream.close()
        os.close(user)


def read(user: int, timeout_s: float = 0.0) -> str:
    """What has arrived by now."""
    data = b""
    while select.select([user], [], [], timeout_s)[0]:
        try:
            chunk = os.read(user, 1 << 16)
        except OSError:  # Linux's way to say that the other end is closed
            break
        data += chunk
    return data.decode()


def test_the_line_is_redrawn_and_lines_scroll_by_above_it() -> None:
    screen, clock = Screen(), Clock()
    with terminal() as (user, stream):
        live = LiveLine(stream)
        lines = LinesPrinter(stream=stream, live=live, clock=clock)
        board = TextDashboard(stream=stream, live=live, clock=clock)
        for event in started(2):
            lines.on_event(event), board.on_event(event)
        for tick in range(1, 31):
            clock.now_s += 0.1
            if tick % 10 == 0:
                lines.on_event(LogLines(1, START_S, lines=(f"at {tick}",)))
            samples = [sample(rank, tick, 30) for rank in range(2)]
            lines.on_readings(samples), board.on_readings(samples)
            screen.write(read(user))
        assert screen.text.split("\n")[:3] == ["[1] at 10", "[1] at 20", "[1] at 30"]
        assert screen.lines[3].startswith("train")
        assert len(screen.lines) == 4
        for event in ended(2):
            lines.on_event(event), board.on_event(event)
        lines.close(), board.close()
        screen.write(read(user))
    assert screen.lines[3].startswith("rank  state")
    assert "train: done in 12 s" in screen.text
    assert len({line for line in screen.snapshots if line.startswith("train")}) > 10


def test_updates_are_at_most_five_a_second() -> None:
    clock, screen = Clock(), Screen()
    with terminal() as (user, stream):
        board = TextDashboard(stream=stream, live=LiveLine(stream), clock=clock)
        for event in started(1):
            board.on_event(event)
        for tick in range(100):
            clock.now_s += 0.1
            board.on_readings([sample(0, tick)])
            screen.write(read(user))
    assert 30 <= len(screen.snapshots) <= 51


def test_nothing_is_redrawn_without_a_terminal() -> None:
    stream, clock = io.StringIO(), Clock()
    live = LiveLine(stream)
    assert not live.is_possible
    board = TextDashboard(stream=stream, live=live, clock=clock)
    for event in started(1):
        board.on_event(event)
    for tick in range(100):
        clock.now_s += 0.1
        board.on_readings([sample(0, tick)])
    assert "\r" not in stream.getvalue()
    assert 1 <= len(stream.getvalue().splitlines()) <= 3


def test_a_closed_stream_is_no_terminal() -> None:
    stream = io.StringIO()
    stream.close()
    assert not LiveLine(stream).is_possible


def test_a_line_is_cut_to_the_width_of_the_terminal() -> None:
    with terminal() as (user, stream):
        live = LiveLine(stream)
        assert live.width == COLUMNS - 1
        live.show("x" * 500)
        assert read(user) == "\r" + "x" * (COLUMNS - 4) + "..."
        live.show("y")
        live.clear()
        live.clear()
        assert read(user) == "\ry" + " " * (COLUMNS - 2) + "\r \r"


@pytest.mark.parametrize(
    ("text", "width", "expected"),
    [("abc", 3, "abc"), ("abcdef", 5, "ab..."), ("漢字漢字", 7, "漢字..."), ("", 3, "")],
)
def test_cut(text: str, width: int, expected: str) -> None:
    assert cut(text, width) == expected
    assert columns_of(expected) <= width


def test_a_terminal_without_block_characters_gets_others() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    live = LiveLine(stream)
    assert not live.can_draw_blocks
    live.show("50% █")
    assert stream.buffer.getvalue() == b"\r50% ?"  # type: ignore[attr-defined]


@pytest.mark.timeout(90)
def test_a_script_in_a_terminal_shows_a_bar_then_the_table(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    screen = Screen()
    with terminal() as (user, stream):
        process = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env={**os.environ, "PYTHONPATH": str(ROOT), "NBLAUNCH_LOG_DIR": str(tmp_path / "logs")},
        )
        while process.poll() is None:
            screen.write(read(user, 0.1))
        screen.write(read(user, 0.1))
    assert process.returncode == 0, screen.text
    bars = [line for line in screen.snapshots if line.startswith("train") and "/40 [" in line]
    steps = [int(line.partition("/40")[0].rpartition(" ")[2]) for line in bars]
    assert len(set(steps)) >= 3, screen.snapshots
    assert steps == sorted(steps)
    rows = screen.text.splitlines()
    assert [line for line in rows if line.startswith("[")].count("[1] at 30") == 1
    table = next(index for index, line in enumerate(rows) if line.startswith("rank  state"))
    assert "done" in rows[table + 1]
    assert "done" in rows[table + 2]
    assert rows[table + 3].startswith("train: done in")
    assert not any("\r" in line or "%|" in line for line in rows)
    assert len(rows) < 20
