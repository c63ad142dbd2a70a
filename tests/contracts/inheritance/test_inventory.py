"""The inventory is complete: each row has a contract test, and the documentation shows the same table."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from nblaunch.worker.inheritance.inventory import KINDS, Treatment, Way
from tests.contracts.inheritance import contract

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "how-a-launch-works.md"
BEGIN, END = "<!-- inventory: begin -->\n", "<!-- inventory: end -->\n"


def test_names_are_unique() -> None:
    names = [kind.name for kind in KINDS]
    assert len(set(names)) == len(names)


def test_rows_and_contract_tests_match() -> None:
    for file in HERE.glob("test_*.py"):
        if file != Path(__file__):
            importlib.import_module(f"tests.contracts.inheritance.{file.stem}")
    assert contract.covered == {kind.name for kind in KINDS}


def test_the_documentation_shows_the_inventory(pytestconfig: pytest.Config) -> None:
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    shown, after = rest.split(END)
    if pytestconfig.getoption("--update-golden"):
        PAGE.write_text(before + BEGIN + table() + END + after, encoding="utf-8")
        return
    assert shown == table(), "`make golden` writes the table anew"


def table() -> str:
    rows = [
        "| In the kernel | Forked worker | Worker started by forkserver or spawn |",
        "|---|---|---|",
        *(f"| {kind.name} | {_cell(kind.fork)} | {_cell(kind.fresh)} |" for kind in KINDS),
    ]
    return "\n".join(rows) + "\n"


def _cell(way: Way) -> str:
    assert way.treatment in Treatment
    return f"{way.treatment.value}: {way.text}"
