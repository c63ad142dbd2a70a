"""The documentation's table of inherited state: each row has a contract test, and says what each worker gets."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.contracts.inheritance import contract

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "how-a-launch-works.md"
TREATMENTS = {"kept", "renewed", "dropped", "rejected", "noted"}


def rows() -> list[list[str]]:
    """Return the cells of the rows, without the heading."""
    table = PAGE.read_text(encoding="utf-8").partition("## What a worker inherits")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[1:]]


def test_rows_and_contract_tests_match() -> None:
    for file in HERE.glob("test_*.py"):
        if file != Path(__file__):
            importlib.import_module(f"tests.contracts.inheritance.{file.stem}")
    names = [row[0] for row in rows()]
    assert len(names) == len(set(names))
    assert contract.covered == set(names)


def test_each_cell_begins_with_a_treatment() -> None:
    assert {cell.partition(":")[0] for row in rows() for cell in row[1:]} == TREATMENTS
    assert {len(row) for row in rows()} == {3}
