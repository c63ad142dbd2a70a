"""The screen of a running notebook: lines stay, and tables move below them."""

from __future__ import annotations

import io

import pytest

from nblaunch.cli.notebook_client import Screen
from tests.terminal import Emulator


class Terminal(io.StringIO):
    """A stream with the screen of a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self.emulator = Emulator()

    def write(self, text: str) -> int:
        self.emulator.write(text)
        return super().write(text)

    @property
    def shown(self) -> list[str]:
        return self.emulator.text.splitlines()


@pytest.fixture
def terminal() -> Terminal:
    """Return a terminal of the default size, 80 columns and 24 lines."""
    return Terminal()


def test_lines_scroll_above_the_table(terminal: Terminal) -> None:
    screen = Screen(terminal, is_live=True)
    screen.heading("[1/1] train()")
    screen.table("nblaunch-1", "0 step 1\n1 step 1")
    assert terminal.shown == ["[1/1] train()", "0 step 1", "1 step 1"]
    screen.text("loss 3\nloss")
    assert terminal.shown == ["[1/1] train()", "loss 3", "0 step 1", "1 step 1"]
    screen.table("nblaunch-1", "0 step 2\n1 step 2\ntwo done")
    screen.text(" 2\n")
    assert terminal.shown == ["[1/1] train()", "loss 3", "loss 2", "0 step 2", "1 step 2", "two done"]
    screen.table("nblaunch-1", "done")
    screen.end_cell()
    screen.text("after\n")
    assert terminal.shown == ["[1/1] train()", "loss 3", "loss 2", "done", "after"]


def test_an_unfinished_line_is_not_lost(terminal: Terminal) -> None:
    screen = Screen(terminal, is_live=True)
    screen.text("no table yet: ")
    screen.text("10%")
    assert terminal.shown == ["no table yet: 10%"]
    screen.text("\n")
    screen.table("nblaunch-1", "table")
    screen.text("half a line")
    assert terminal.shown == ["no table yet: 10%", "table"]
    screen.end_cell()
    assert terminal.shown == ["no table yet: 10%", "table", "half a line"]


def test_a_table_after_an_unfinished_line_gets_its_own_line(terminal: Terminal) -> None:
    screen = Screen(terminal, is_live=True)
    screen.text("half")
    screen.table("nblaunch-1", "table")
    screen.table("nblaunch-1", "table 2")
    assert terminal.shown == ["half", "table 2"]
    screen.heading("next cell")
    screen.text("half again")
    screen.heading("another")
    assert terminal.shown == ["half", "table 2", "next cell", "half again", "another"]


def test_only_live_lines_are_cut(terminal: Terminal) -> None:
    screen = Screen(terminal, is_live=True)
    rows = [f"{rank:2} " + "x" * 100 for rank in range(30)]
    screen.table("nblaunch-1", "\n".join(rows))
    assert terminal.shown == [*(row[:80] for row in rows[:23]), "...".rjust(41)]
    screen.end_cell()
    assert terminal.shown == rows


def test_two_tables_stand_below_each_other(terminal: Terminal) -> None:
    screen = Screen(terminal, is_live=True)
    screen.table("nblaunch-1", "one")
    screen.table("nblaunch-2", "two")
    screen.table("nblaunch-1", "one again")
    assert terminal.shown == ["one again", "two"]


def test_a_file_gets_few_tables_including_the_last() -> None:
    stream, now_s = io.StringIO(), 0.0
    screen = Screen(stream, clock=lambda: now_s)
    screen.heading("cell")
    screen.text("\x1b[31mred\x1b[0m\n")
    for step in range(200):
        screen.table("nblaunch-1", f"step {step}")
        now_s += 0.5
    screen.end_cell()
    screen.end_cell()
    assert stream.getvalue().splitlines() == [
        "cell",
        "red",
        "step 0",
        "step 60",
        "step 120",
        "step 180",
        "step 199",
    ]
