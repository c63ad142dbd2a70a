"""The common structure of all example notebooks, checked without executing them."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.architecture.source import ROOT
from tests.notebooks.checks import CHECKS
from tests.tools.notebooks import fingerprint

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path: Path) -> Any:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    return notebook


def code_of(cell: Any) -> ast.Module:
    """Return the cell's Python code, without lines that only IPython understands."""
    return ast.parse(re.sub(r"^(\s*)[%!].*$", r"\1pass", cell.source, flags=re.MULTILINE))


def test_notebooks_begin_with_their_goal(path: Path) -> None:
    first = read(path).cells[0]
    assert first.cell_type == "markdown"
    title, promise = first.source.split("\n\n", 1)
    assert title.startswith("# ")
    assert 80 < len(promise) < 400


def test_notebooks_install_only_missing_packages(path: Path) -> None:
    lines = [line for cell in read(path).cells for line in cell.source.splitlines() if "%pip" in line]
    assert lines
    assert all(line.startswith("    ") for line in lines), "an install that is not behind a condition"


def test_notebooks_have_small_defaults_in_a_tagged_cell(path: Path) -> None:
    tagged = [cell for cell in read(path).cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    statements = code_of(tagged[0]).body
    assert statements
    assert all(isinstance(statement, ast.Assign) for statement in statements), (
        "a parameter is a plain assignment"
    )


def test_notebook_checks_are_in_the_tests(path: Path) -> None:
    asserted = [
        cell.id
        for cell in read(path).cells
        if cell.cell_type == "code" and any(isinstance(node, ast.Assert) for node in ast.walk(code_of(cell)))
    ]
    assert asserted == []
    assert path.stem in CHECKS


def test_stored_notebooks_match_their_execution(path: Path) -> None:
    """Only the structure is compared, because numbers differ between runs."""
    notebook = read(path)
    assert notebook.metadata.get("nblaunch", {}).get("executed") == fingerprint(notebook), (
        f"its code has changed since it was executed: make notebooks ARGS={path.stem}"
    )
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    for cell in cells:
        if launches(cell):
            shown = [output for output in cell.outputs if "text/html" in output.get("data", {})]
            assert shown, f"{cell.id} does not show the table of its job"
    assert "widgets" not in notebook.metadata
    assert path.stat().st_size < 400_000


def launches(cell: Any) -> bool:
    """Return whether the cell itself calls ``notebook_launcher``, not only inside a function definition."""
    statements = [node for node in code_of(cell).body if not isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return any(
        isinstance(node, ast.Call) and ast.unparse(node.func) == "notebook_launcher"
        for statement in statements
        for node in ast.walk(statement)
    )


def test_notebooks_do_not_show_local_paths(path: Path) -> None:
    text = json.dumps([cell.get("outputs") for cell in read(path).cells])
    assert str(ROOT) not in text
    assert str(Path.home()) + "/" not in text
    assert not re.search(r"Warning: |\[WARNING\]|WARNING: ", text), (
        "a warning, which readers take for a fault of theirs"
    )


def test_notebooks_have_more_text_than_code(path: Path) -> None:
    cells = read(path).cells
    prose = [cell for cell in cells if cell.cell_type == "markdown"]
    assert len(prose) >= len(cells) / 4
    for cell in cells:
        assert cell.source.strip(), "an empty cell"
