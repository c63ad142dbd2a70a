"""The stored notebook files. Other tests execute them."""

from __future__ import annotations

import json
from pathlib import Path

import nbformat
import pytest

from tests.architecture.source import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

WIDGET_STATE = "application/vnd.jupyter.widget-state+json"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_is_shown_by_github(path: Path) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    nbformat.validate(notebook)
    metadata = notebook["metadata"]
    # GitHub then shows only "Invalid Notebook: the 'state' key is missing from 'metadata.widgets'".
    widgets = metadata.get("widgets")
    assert widgets is None or "state" in widgets.get(WIDGET_STATE, {})
    # Without it, Colab and GitHub guess the language.
    assert metadata["kernelspec"]["name"] == "python3"
