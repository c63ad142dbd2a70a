"""The saved output of a job, however the notebook was executed and wherever it is displayed."""

from __future__ import annotations

import re
from typing import Any

import nbformat
import pytest
from nbconvert import HTMLExporter

from tests.event_loop import event_loop  # noqa: F401  a fixture
from tests.notebooks.saved import WIDGET_VIEW, check_for_github, executed, outputs, texts, visible_text

CELLS = [
    """
import time
from nblaunch import Accelerator, notebook_launcher

def train():
    accelerator = Accelerator()
    print("<script>alert(1)</script>")
    for step in accelerator.progress(range(30)):
        accelerator.log({"accuracy": step / 30}, step=step)
        time.sleep(0.02)

notebook_launcher(train, num_processes=2, backend="cpu")
""",
]
WAYS = [(False, True), (True, True), (True, False)]
"""Whether execution is interactive, and whether widget states are kept; without a front end, there are no widgets."""


@pytest.fixture(scope="module")
def notebooks(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[bool, bool], Any]:
    folder = tmp_path_factory.mktemp("saved")
    return {way: executed(CELLS, folder, is_interactive=way[0], keeps_widgets=way[1]) for way in WAYS}


def without_measurements(text: str) -> str:
    """Replace times, rates, sizes and paths, which differ between runs, unlike words and layout."""
    text = re.sub(r"\d+:\d+(:\d+)?|(?<=logs: ).*", "#", text)
    text = re.sub(r" +", " ", re.sub(r"[\d.,]*\d", "#", text))
    # A short job may end before its memory is measured.
    return re.sub(r"^peak memory: .*\n", "", text, flags=re.MULTILINE)


def test_the_final_text_is_reproducible(notebooks: dict[tuple[bool, bool], Any]) -> None:
    final = {way: without_measurements(texts(notebook)) for way, notebook in notebooks.items()}
    assert len(set(final.values())) == 1, final
    text = texts(notebooks[True, True])
    assert "train: done in" in text
    assert "ranks 0 and 1 alike" in text
    assert "accuracy: 0.9667" in text


@pytest.mark.parametrize("way", WAYS)
def test_no_output_needs_a_widget(notebooks: dict[tuple[bool, bool], Any], way: tuple[bool, bool]) -> None:
    notebook = notebooks[way]
    check_for_github(notebook)
    shown = [output.data for output in outputs(notebook) if "data" in output]
    assert all(set(data) == {"text/html", "text/plain"} for data in shown)
    assert WIDGET_VIEW not in str(shown)
    if not way[0]:
        assert "widgets" not in notebook.metadata


@pytest.mark.parametrize("template", ["lab", "classic"])
def test_nbconvert_shows_the_table_without_scripts(
    notebooks: dict[tuple[bool, bool], Any], template: str
) -> None:
    page, _ = HTMLExporter(template_name=template).from_notebook_node(notebooks[True, True])
    text = visible_text(page)
    assert re.search(r"^0 ✓ done .*30/30", text, re.MULTILINE)
    assert re.search(r"^1 ✓ done .*30/30", text, re.MULTILINE)
    assert "train done in" in text
    assert "0 to 0.967 in 29 steps" in text
    assert "logs: /" in text
    assert "[0] <script>alert(1)</script>" in text
    assert "<script>alert(1)" not in page


def test_a_sanitised_page_keeps_the_words(notebooks: dict[tuple[bool, bool], Any]) -> None:
    """GitHub and other sites drop styles, SVG and everything else that they do not know."""
    page, _ = HTMLExporter(sanitize_html=True).from_notebook_node(notebooks[True, True])
    # The final table is also in a widget's state, for pages that were reloaded while the cell ran.
    page = re.sub(
        r'<script type="application/vnd.jupyter.widget-state\+json">.*?</script>', "", page, flags=re.DOTALL
    )
    assert "<svg" not in page.partition("<body")[2]
    text = visible_text(page)
    assert re.search(r"^0 ✓ done .*30/30", text, re.MULTILINE)
    assert "0 to 0.967 in 29 steps" in text


def test_notebooks_that_github_rejects_are_found() -> None:
    notebook = nbformat.v4.new_notebook()
    check_for_github(notebook)
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": {"version_major": 2}}
    with pytest.raises(AssertionError, match="Invalid Notebook"):
        check_for_github(notebook)
