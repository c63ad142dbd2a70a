"""The documentation's tables of inherited state: each row has a contract test, and says what each worker gets."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.contracts.inheritance import contract

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "what-a-worker-inherits.md"
TREATMENTS = {"kept", "renewed", "dropped", "rejected", "noted"}


def rows() -> list[list[str]]:
    """Return the cells of the rows, without the headings."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in lines
        if not line.startswith("| In the kernel ")
    ]


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


def test_cells_are_short() -> None:
    assert [cell for row in rows() for cell in row if len(cell.split()) > 15] == []
