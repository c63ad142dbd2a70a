"""The TPU notebook, executed with the real torch_xla; tests/notebooks executes it on plain CPU processes."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from tests.event_loop import event_loop  # noqa: F401  a fixture
from tests.notebooks.saved import execute, texts
from tests.thorough import thorough

ROOT = Path(__file__).parents[2]


@pytest.mark.usefixtures("compile_quickly")
@pytest.mark.parametrize("num_devices", [thorough(1), 8])
def test_the_tpu_notebook_runs(monkeypatch: pytest.MonkeyPatch, num_devices: int) -> None:
    """A core replaces a chip: the notebook requests one process per device, and the environment sets their number.

    It trains for fewer epochs than in the notebook; the other test checks the learned result.
    """
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    monkeypatch.setenv("NBLAUNCH_NUM_PROCESSES", str(num_devices))
    path = ROOT / "notebooks" / "03_tpu.ipynb"
    notebook = nbformat.read(path, as_version=4)
    (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    parameters.source += "\nepochs = 2"
    execute(notebook, path.parent, timeout_s=250, is_new=True)
    text = texts(notebook)
    assert "backend: xla" in text
    assert re.search(rf"train: done in .* on {num_devices} process(es)? \(xla, fork", text)
    assert re.search(r"training: \d+ graphs? compiled in \d", text), (
        "the cost of the first steps is not shown"
    )
    assert "float and double are bfloat16" in text
