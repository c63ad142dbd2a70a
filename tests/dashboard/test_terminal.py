"""Redrawing in a terminal: a real pseudo-terminal with an emulated screen."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nblaunch.dashboard import open_live
from nblaunch.dashboard.fold import fold_readings
from nblaunch.dashboard.lines import LinesPrinter
from nblaunch.dashboard.text import LiveTable, TextDashboard, has_colour, render_text
from nblaunch.events import HostMemory, LogLines, Note, Stalled
from tests.dashboard.scenes import START_S, Clock, ended, raised, sample, started, trained, view_of
from tests.terminal import Emulator

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
    for _ in accelerator.progress(range(2), desc="closing"):
        pass

notebook_launcher(train, num_processes=2, backend="cpu")
"""


@pytest.fixture(autouse=True)
def no_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the user's settings for colours in terminals."""
    monkeypatch.setenv("TERM", "xterm")
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@contextmanager
def terminal(columns: int = COLUMNS, encoding: str = "utf-8") -> Iterator[tuple[int, io.TextIOWrapper]]:
    """Open a pseudo-terminal; yield the user's end, and a stream into the other end."""
    user, program = pty.openpty()
    fcntl.ioctl(program, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
    stream = io.TextIOWrapper(io.FileIO(program, "w"), encoding=encoding, write_through=True)
    try:
        yield user, stream
    finally:
        stream.close()
        os.close(user)


def read(user: int, timeout_s: float = 0.0) -> str:
    """Return the output so far, up to the end of a character."""
    data = b""
    while select.select([user], [], [], timeout_s)[0] or not _is_whole(data):
        try:
            chunk = os.read(user, 1 << 16)
        except OSError:  # Linux reports a closed other end this way
            break
        data += chunk
    return data.decode()


def _is_whole(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_progress_is_redrawn_and_lines_scroll_by_above_it() -> None:
    screen, clock, seen = Emulator(), Clock(), set()
    with terminal() as (user, stream):
        live = LiveTable(stream)
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
            seen |= {line for line in screen.text.splitlines() if f" {tick}/30 " in line}
        assert screen.text.splitlines()[:3] == ["[1] at 10", "[1] at 20", "[1] at 30"]
        assert screen.lines[3].startswith("train")
        assert len(screen.text.splitlines()) == 8
        for event in ended(2):
            lines.on_event(event), board.on_event(event)
        lines.close(), board.close()
        screen.write(read(user))
    assert screen.lines[3].startswith("train: done in 12 s")
    assert not screen.is_cursor_hidden
    assert len(seen) > 10
    assert {32, 36} <= screen.colours  # green and cyan


def test_updates_are_at_most_five_a_second() -> None:
    clock, num_drawn = Clock(), 0
    with terminal() as (user, stream):
        board = TextDashboard(stream=stream, live=LiveTable(stream), clock=clock)
        for event in started(1):
            board.on_event(event)
        for tick in range(100):
            clock.now_s += 0.1
            board.on_readings([sample(0, tick)])
            num_drawn += bool(read(user))
    assert 30 <= num_drawn <= 51


def test_nothing_is_redrawn_without_a_terminal() -> None:
    stream, clock = io.StringIO(), Clock()
    live = open_live(stream)
    assert live is None
    board = TextDashboard(stream=stream, live=live, clock=clock)
    for event in started(1):
        board.on_event(event)
    for tick in range(100):
        clock.now_s += 0.1
        board.on_readings([sample(0, tick)])
    assert "\r" not in stream.getvalue()
    assert 1 <= len(stream.getvalue().splitlines()) <= 3


def test_a_closed_stream_is_not_a_terminal() -> None:
    stream = io.StringIO()
    stream.close()
    assert open_live(stream) is None


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_narrow_terminal_omits_columns_instead_of_cutting_cells(width: int) -> None:
    stall = Stalled(1, START_S + 13, "train_with_a_long_name.py, line 18", "", 3.0)
    memory = [HostMemory(rank, START_S + 13, 812_000_000) for rank in range(3)]
    view = fold_readings(view_of([stall, *memory], trained(3)), [], START_S + 22)
    lines = render_text(view, width=width, is_live=True).splitlines()
    assert [line.split()[0] for line in lines[1:6]] == ["rank", "all", "0", "1", "2"]
    assert {"state", "step", "loss"} <= set(lines[1].split())
    assert ("steps/s" in lines[1], "peak memory" in lines[1]) == (width >= 100, width >= 140)
    assert ["…" in line for line in lines[1:6]] == [False] * 3 + [width >= 80, False]
    assert "no progress" in lines[4]
    assert "100/1,000" in lines[5]
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("width", [60, 80, 100, 140])
def test_the_last_table_has_the_columns_of_the_live_one(width: int) -> None:
    memory = [HostMemory(rank, START_S + 10, 812_000_000) for rank in range(2)]
    view = view_of(memory, trained(2))
    screen, clock = Emulator(), Clock()
    with terminal(width) as (user, stream):
        live = LiveTable(stream)
        live.draw(view)
        screen.write(read(user))
        before = screen.text.splitlines()[1]
        live.clear()
        board = TextDashboard(stream=stream, live=live, clock=clock)
        for event in started(2):
            board.on_event(event)
        board.on_readings([sample(rank, 0, 1000) for rank in range(2)])
        board.on_readings([sample(rank, 100 + rank, 1000, loss=0.0099) for rank in range(2)])
        for event in [*memory, *ended(2)]:
            board.on_event(event)
        board.close()
        screen.write(read(user))
    lines = screen.text.splitlines()
    (head,) = (number for number, line in enumerate(lines) if line.startswith("rank"))
    columns = [name for name in re.split(r"  +", before) if name != "ETA"]  # the screen is empty
    assert set(columns) <= set(re.split(r"  +", lines[head]))
    assert max(map(len, lines[head : head + 4])) <= width
    assert ("progress" in before, "━" in lines[head + 1]) == ((width >= 80,) * 2)


def test_the_last_table_uses_the_files_encoding() -> None:
    for encoding, bar in (("utf-8", "━"), ("ascii", "?")):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        board = TextDashboard(stream=stream)
        for event in started(2):
            board.on_event(event)
        board.on_readings([sample(rank, 100 + rank, 1000) for rank in range(2)])
        for event in ended(2):
            board.on_event(event)
        board.close()
        text = stream.buffer.getvalue().decode(encoding)  # type: ignore[attr-defined]
        assert bar in text


def test_a_live_table_uses_the_terminals_encoding() -> None:
    screen = Emulator()
    with terminal(encoding="ascii") as (user, stream):
        live = LiveTable(stream)
        live.draw(view_of(started(2, function_name="entraîner")))
        screen.write(read(user))
        assert screen.lines[0].startswith("entra?ner: running for 0 s")
        live.clear()


def test_tall_tables_are_cut() -> None:
    screen = Emulator()
    with terminal() as (user, stream):
        live = LiveTable(stream)
        view = view_of([raised(rank, f"failure {rank}") for rank in range(16)], trained(16))
        for _ in range(3):
            live.draw(
                view_of([Note(-1, START_S, f"warning {number}", "warning") for number in range(20)], view)
            )
        screen.write(read(user))
        assert len(screen.lines) <= 30
        live.clear()
        screen.write(read(user))
    assert screen.text == ""


@pytest.mark.parametrize(
    ("variables", "in_terminal", "in_file"),
    [
        ({}, True, False),
        ({"NO_COLOR": "1"}, False, False),
        ({"FORCE_COLOR": "1"}, True, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False, False),
        ({"NO_COLOR": ""}, True, False),
        ({"TERM": "dumb"}, False, False),
        ({"TERM": "unknown"}, False, False),
    ],
)
def test_colours_need_a_terminal_or_a_variable(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], in_terminal: bool, in_file: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with terminal() as (user, stream):
        board = TextDashboard(stream=stream, live=LiveTable(stream))
        for event in [*started(2), *ended(2)]:
            board.on_event(event)
        board.close()
        assert ("\x1b[32m" in read(user)) == in_terminal
        assert has_colour(stream) == in_terminal
        assert (open_live(stream) is None) == ("TERM" in variables)
    file = io.StringIO()
    board = TextDashboard(stream=file)
    for event in [*started(2), *ended(2)]:
        board.on_event(event)
    board.close()
    assert ("\x1b[" in file.getvalue()) == in_file
    assert open_live(file) is None


def test_a_script_in_a_terminal_shows_a_table_that_moves(tmp_path: Path) -> None:
    screen, seen = _run_script(tmp_path)
    steps = [list(map(int, re.findall(r" (\d+)/40 ", text))) for text in seen if "/40 " in text]
    assert len({tuple(step) for step in steps}) >= 3, seen[-5:]
    assert all(len(step) == 3 for step in steps)  # a row for the job and one per rank
    assert not screen.is_cursor_hidden
    _assert_ended(screen)


def test_dumb_terminals_are_not_redrawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    screen, _ = _run_script(tmp_path)
    assert screen.num_controls == 0
    _assert_ended(screen)


BREAKS = """
import os, time
from nblaunch import Accelerator, notebook_launcher

def train():
    accelerator = Accelerator()
    for step in accelerator.progress(range(10_000)):
        time.sleep(0.02)
        if os.path.exists("seen"):
            break
    print("printed before")
    breakpoint()
    print("printed after")

notebook_launcher(train, num_processes=1, backend="cpu")
"""


def test_debugger_prompts_below_output_without_table(tmp_path: Path) -> None:
    script, screen = tmp_path / "train.py", Emulator()
    script.write_text(BREAKS)
    with terminal() as (user, stream):
        process = subprocess.Popen(
            [sys.executable, str(script)],
            cwd=tmp_path,
            stdin=stream,
            stdout=stream,
            stderr=stream,
            env={**os.environ, "PYTHONPATH": str(ROOT), "NBLAUNCH_LOG_DIR": str(tmp_path / "logs")},
        )
        try:
            _read_until(lambda: "/10,000" in screen.text, screen, user, process)
            (tmp_path / "seen").touch()
            _read_until(lambda: screen.text.endswith("[0] (Pdb)"), screen, user, process)
            first, second, *_ = screen.text.splitlines()
            assert first == "printed before"
            assert second.startswith("rank 0 at breakpoint() in ")
            assert "steps/s" not in screen.text
            assert not screen.is_cursor_hidden
            os.write(user, b"c\n")
            _read_until(lambda: "train: done in" in screen.text, screen, user, process)
            assert screen.text.splitlines().count("printed after") == 1
        finally:
            process.kill()
            process.wait()


def _read_until(
    condition: Callable[[], bool], screen: Emulator, user: int, process: subprocess.Popen[bytes]
) -> None:
    while not condition():
        assert process.poll() is None or select.select([user], [], [], 0)[0], screen.text
        screen.write(read(user, 0.1))


def _run_script(tmp_path: Path) -> tuple[Emulator, list[str]]:
    """Run the script in a terminal; return the final screen and earlier ones."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    screen, seen = Emulator(), []
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
            seen.append(screen.text)
        screen.write(read(user, 0.1))
    assert process.returncode == 0, screen.text
    return screen, seen


def _assert_ended(screen: Emulator) -> None:
    rows = screen.text.splitlines()
    assert [line for line in rows if line.startswith("[")].count("[1] at 30") == 1
    first = next(index for index, line in enumerate(rows) if line.startswith("train: done in"))
    assert any(row.startswith("ranks 0 and 1 alike") for row in rows[first:])
    assert not any("\r" in line or "%|" in line or "closing" in line for line in rows)
    assert len(rows) < 20
