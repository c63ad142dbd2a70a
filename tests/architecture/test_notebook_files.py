"""Notebooks as they are stored. That they run is tested elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest

from tests.architecture.source import ROOT, listing

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

WIDGET_STATE = "application/vnd.jupyter.widget-state+json"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_stored_clean(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    nbformat.validate(notebook)
    code_cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    offenders = [
        f"cell {number}: {''.join(cell['source'])[:60]!r}"
        for number, cell in enumerate(code_cells, 1)
        if cell["outputs"] or cell["execution_count"] is not None
    ]
    assert not offenders, f"outputs are stored; clear them before a commit:{listing(offenders)}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_shown_by_github(path: Path) -> None:
    metadata = json.loads(path.read_text(encoding="utf-8"))["metadata"]
    # GitHub answers "Invalid Notebook: the 'state' key is missing from 'metadata.widgets'" and shows nothing at all.
    widgets = metadata.get("widgets")
    assert widgets is None or "state" in widgets.get(WIDGET_STATE, {})
    # Without it, Colab and GitHub guess the language.
    assert metadata["kernelspec"]["name"] == "python3"
