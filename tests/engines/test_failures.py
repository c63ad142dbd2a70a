"""Failures on a node are reported as on one machine: with the same type and text, except for the node's label."""

from __future__ import annotations

import re

import pytest

from tests.engines.conftest import FAILING, comparable
from tests.kernels import Kernel
from tests.thorough import thorough

CELL = (
    FAILING
    + """
def error_of(what, who, **settings):
    limits = {"hang_timeout_s": 3, "on_hang": "stop"} if what == "hang" else {}
    try:
        return "nothing", str(launch(train, what, who, dashboard="none", **limits, **settings)), "", [], False
    except BaseException as error:
        own = error.code == 7 if isinstance(error, MyError) else False
        frames = [entry.lineno for entry in __import__("traceback").extract_tb(error.__traceback__)
                  if entry.name == "train"]
        return type(error).__name__, str(error), "\\n".join(getattr(error, "__notes__", ())), frames, own
"""
)

CASES = [("error", 3), ("SIGKILL", 1), ("unpicklable result", -1)]
MORE_CASES = [("error", 1), ("SIGSEGV", 3), ("exit 0", 3), ("return", 1), ("hang", 3)]


@pytest.mark.parametrize("cases", [CASES, thorough(MORE_CASES)], ids=["some", "more"])
def test_failures_match_one_machine(kept: Kernel, cases: list[tuple[str, int]]) -> None:
    kept.run(CELL)
    for what, who in cases:
        local = kept.run(f"error_of({what!r}, {who}, engine='local', num_nodes=1)").value
        there = kept.run(f"error_of({what!r}, {who})").value
        assert local[0] != "nothing", (what, who)
        assert [comparable(str(part)) for part in there] == [comparable(str(part)) for part in local], (
            what,
            who,
        )
        label = f"node {who // 2} (host "
        assert label in there[1] + there[2] or what in ("hang", "unpicklable result"), there
        assert kept.run("are_only_programs_left()").value is True


def test_the_cell_shows_the_users_line(kept: Kernel) -> None:
    kept.run(CELL)
    cell = kept.run("launch(train, 'error', 3)", raises="MyError")
    assert 'raise MyError("the loss is nan", code=7)' in cell.raised.text
    assert "nblaunch/" not in cell.raised.text


def test_node_rejection_is_raised_before_ranks_start(notebook: Kernel) -> None:
    notebook.run("class Picky:\n    def __reduce__(self): return __import__('sys').exit, ('not here',)")
    error = notebook.run("launch(print, Picky())", raises="LaunchError").raised
    assert re.match(r"node \d \(host ", error.value)
    assert "SystemExit: not here" in error.value
    assert notebook.run("nblaunch.last_job().pids").value == {}
