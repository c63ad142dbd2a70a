"""Every example notebook, executed from top to bottom by nbclient."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.event_loop import event_loop  # noqa: F401  a fixture
from tests.notebooks.checks import CHECKS, RAISED, SMALL
from tests.notebooks.saved import check_for_github, execute, texts
from tests.profiles import python_of
from tests.thorough import thorough
from tests.tools.notebooks import kernel_of

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
ARTIFACTS = FOLDER.parent / "artifacts" / "notebooks"
"""Executed copies, one folder per kind of kernel; not part of the repository."""

SHOWN = ("01", "04", "05")
"""Notebooks whose outputs depend on the Jupyter packages: tables, errors, jobs, buttons."""

FRESH = "01"
"""The notebook that runs in a new interpreter; the kernels of the others are forked after the import of torch."""

_VERSIONS = "import importlib.metadata as m; print(*map(m.version, ['ipykernel', 'ipython', 'ipywidgets']))"


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep notebooks from downloading data; they then use generated data."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def executed(
    path: Path,
    parameters: str,
    *last_cells: str,
    python: str = sys.executable,
    timeout_s: int = 500,
    is_new: bool = True,
) -> Any:
    """Return the executed notebook, with ``parameters`` set after its own and more cells at the end."""
    notebook = nbformat.read(path, as_version=4)
    if parameters:
        tagged = [i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", [])]
        notebook.cells.insert(tagged[0] + 1, nbformat.v4.new_code_cell(parameters))
    notebook.cells += [nbformat.v4.new_code_cell(source) for source in last_cells]
    with kernel_of(python) as name:
        execute(notebook, path.parent, timeout_s, is_new=is_new, kernel_name=name)
    return notebook


@pytest.mark.parametrize(
    ("profile", "path"),
    [
        *(("newest", path) for path in NOTEBOOKS),
        *(
            ("colab", path) if path.stem.startswith("04") else thorough("colab", path)
            for path in NOTEBOOKS
            if path.stem.startswith(SHOWN)
        ),
    ],
    ids=lambda one: getattr(one, "stem", one),
)
def test_notebooks_run_and_pass_their_checks(path: Path, profile: str) -> None:
    last_cell = f"{CHECKS[path.stem]}\n{_VERSIONS}"
    notebook = executed(
        path,
        SMALL.get(path.stem, ""),
        last_cell,
        python=python_of(profile),
        is_new=path.stem.startswith(FRESH),
    )
    # A busy kernel sends the output in pieces.
    versions = "".join(output.text for output in notebook.cells.pop().outputs)
    assert versions.startswith("6.17.1 7.34.0 7.7.") == (profile == "colab")
    copy = ARTIFACTS / profile / path.name
    copy.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook, copy)
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code" and cell.source)
    check(notebook, path)


@pytest.mark.thorough
def test_the_text_classifier_learns() -> None:
    path = FOLDER / "02_text_classification.ipynb"
    check(executed(path, "epochs = 2", CHECKS[path.stem], is_new=False), path)


def check(notebook: Any, path: Path) -> None:
    """Check an executed notebook, in addition to the checks in its last cell."""
    check_for_github(notebook)
    if path.stem == "11_slow_and_wrong":
        assert "waiting for data on all ranks (num_workers=0" in texts(notebook)
        assert "NBLAUNCH_CHECKS=-gradients_not_cleared" in texts(notebook)
    else:
        assert "NBLAUNCH_CHECKS" not in texts(notebook), "an alarm about a loop that is right"
        assert "about the training loop" not in texts(notebook), "a hint about a loop that is right"
    if path.stem == "04_when_things_go_wrong":
        assert "rank 0 puts its things away" in texts(notebook)
        assert {cell.id for cell in notebook.cells if raised(cell)} == RAISED.keys()
        for cell in notebook.cells:
            kind, word = RAISED.get(cell.id, ("", ""))
            assert raised(cell).startswith(kind)
            assert word in raised(cell)


def raised(cell: Any) -> str:
    """Return a cell's error as ``ValueError: its message``; empty without an error."""
    errors = [output for output in cell.get("outputs", []) if output.output_type == "error"]
    return f"{errors[0].ename}: {errors[0].evalue}" if errors else ""


@pytest.mark.thorough
def test_quickstart_result_is_independent_of_processes() -> None:
    """The global batches are the same, so training is the same up to rounding.

    The test above executes it on all cores. With Adam, rounding errors grow over many steps, differently on every
    processor, so this test compares the learned result.
    """
    path = FOLDER / "01_quickstart.ipynb"
    sources = {cell.id: cell.source for cell in nbformat.read(path, as_version=4).cells}
    measure = "print(F.cross_entropy(model(images[test_rows]), labels[test_rows]).item())"
    again = ("num_processes = 4", *(sources[name] for name in ("model", "launch", "evaluate")), measure)
    notebook = executed(path, "num_processes = 1", measure, *again, is_new=False)
    losses = []
    for num_processes, cells in ((1, notebook.cells[: -len(again)]), (4, notebook.cells[-len(again) :])):
        text = texts(nbformat.v4.new_notebook(cells=cells))
        losses.append(float(text.splitlines()[-1]))
        assert ("ranks 0-3 alike" in text) == (num_processes == 4)
        noun = "process" if num_processes == 1 else "processes"
        assert re.search(rf"train: done in .* on {num_processes} {noun} \(cpu, fork\)", text)
        accuracy = re.search(r"accuracy of the notebook's model on 360 test images: ([\d.]+)%", text)
        assert accuracy is not None
        assert float(accuracy[1]) > 90
    assert 0.01 < losses[0] < 0.3, losses
    assert losses[1] == pytest.approx(losses[0], abs=0.02)
