"""The dashboard in JupyterLab: live widgets while a job runs, and the table that replaces them.

The tests write pictures of each stage to ``artifacts/browser``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest

from tests.browser.lab import Browser, Lab, Page
from tests.browser.panel import (
    SETUP,
    bars,
    button,
    have_advanced,
    kill,
    num_saved_widgets,
    num_widgets,
    opened,
    saved_outputs,
    show_lines_of,
    wait_for_red_bar,
    wait_for_table,
)
from tests.browser.themes import photograph

QUICKSTART = Path(__file__).parents[2] / "notebooks" / "01_quickstart.ipynb"

# The quickstart with slow steps, until the browser has seen them. Steps sleep, which leaves the cores to the browser.
EPOCHS = 10
STEP = "            optimizer.zero_grad()\n"
LONGER_STEP = f"{STEP}            time.sleep(0.02 if os.path.exists('seen') else 0.3)\n"

pytestmark = [pytest.mark.slow]


FAILING, ONE, TWO, OTHER, AGAIN, RESULT = range(1, 7)
CELLS = (
    SETUP,
    "notebook_launcher(train, (1000, True), 2, interrupt_grace_s=60)",
    "one = notebook_launcher(train, (100_000,), 2, background=True)",
    "two = notebook_launcher(train, (100_000,), 2, background=True)",
    "print('free')",
    "nblaunch.last_job()",
    "two.result() > 0",
)


@pytest.fixture(scope="module")
def page(lab: Lab, browser: Browser) -> Iterator[Page]:
    """Open a notebook with these cells and run the first one."""
    with opened(lab, browser, CELLS, "jobs.ipynb") as page:
        yield page


def test_the_quickstart_shows_bars_that_advance_while_its_cell_runs(lab: Lab, browser: Browser) -> None:
    quickstart = nbformat.read(QUICKSTART, as_version=4)
    parameters = next(c for c in quickstart.cells if "parameters" in c.metadata.get("tags", []))
    parameters.source = parameters.source.replace("None", "4").replace("epochs = 6", f"epochs = {EPOCHS}")
    parameters.source = f"import os, time\n{parameters.source}"
    function = next(cell for cell in quickstart.cells if STEP in cell.source)
    function.source = function.source.replace(STEP, LONGER_STEP)
    nbformat.write(quickstart, lab.folder / "quickstart.ipynb")
    launch = next(i for i, cell in enumerate(quickstart.cells) if "notebook_launcher(train" in cell.source)
    page = lab.open(browser, "quickstart.ipynb")
    try:
        page.run_all()
        page.wait_until(lambda: len(bars(page, launch)) == 4, "four bars")
        assert page.is_running(launch)
        page.wait_for_text(launch, "epoch 0: loss")  # printed by rank 0, shown in the pane of all ranks
        samples: list[list[float]] = []
        page.wait_until(lambda: have_advanced(page, launch, samples), "each bar at four values")
        assert page.is_running(launch), f"the training was too short to be seen: {samples}"
        page.screenshot("quickstart_live.png", page.output(launch))
        (lab.folder / "seen").touch()
        page.wait_for_text(launch, "done in")
        # The static table, the ranks' lines and the result remain, and no widget.
        wait_for_table(page, launch)
        page.wait_for_text(launch, "ranks 0-3 alike")
        page.wait_for_text(launch, f"[0] epoch {EPOCHS - 1}: loss")
        page.wait_for_text(launch, "{'accuracy': 0.9")
        page.cell(launch).scroll_into_view_if_needed()
        page.screenshot("quickstart_done.png")
        # The curve and the epochs show their last values.
        assert re.search(rf"loss.*\n.* in {22 * EPOCHS:,} steps", page.text(launch))
        assert re.search(rf"^epochs\t.*\n{EPOCHS}\t", page.text(launch), re.MULTILINE)
        page.wait_until_idle(len(quickstart.cells) - 1)
        metadata, outputs = saved_outputs(page, launch)
        # the text for pages that are opened after the end
        assert num_saved_widgets(metadata) <= 5
        assert {"text/html", "text/plain"} in [set(output) for output in outputs]
        assert not any("widget-view" in name for output in outputs for name in output)
    finally:
        page.shut_down()


def test_a_failing_rank_turns_red_and_says_why(lab: Lab, page: Page) -> None:
    page.run(FAILING)
    page.wait_until(lambda: len(bars(page, FAILING)) == 2, "two bars")
    show_lines_of(page, FAILING, rank=1, other=0)
    # This is still the live view: the widgets report the failure, and the other rank ends only on request.
    page.wait_for_text(FAILING, "ValueError: the loss of <i>this</i> rank is nan")
    assert num_widgets(page, FAILING) > 0
    page.wait_for_matches(FAILING, r"^✗ train rank 1 failed, running for", 1)
    wait_for_red_bar(page, FAILING, rank=1)
    page.wait_for_matches(FAILING, r"^1\s+✗ failed", 1)
    assert photograph(page, FAILING, "failing_live") > 5
    (lab.folder / "looked").touch()
    page.wait_for_text(FAILING, "failed in rank 1 after")
    wait_for_table(page, FAILING)
    page.wait_for_matches(FAILING, r"^1\s+✗ failed", 1)
    page.wait_for_text(FAILING, "ValueError: the loss of <i>this</i> rank is nan")
    page.wait_until_idle(FAILING)  # cells that are submitted before this one has failed are not executed
    assert photograph(page, FAILING, "failed") > 5


def test_background_jobs_have_buttons_and_survive_a_reload(page: Page) -> None:
    page.run(ONE)
    page.run(TWO)
    for cell in (ONE, TWO):
        page.wait_until(lambda cell=cell: len(bars(page, cell)) == 2, "two bars")  # type: ignore[misc]
    page.run(OTHER)
    page.wait_for_text(OTHER, "free")
    page.wait_for_text(ONE, "rank 1 at step ")
    button(page, ONE, "Stacks").click()
    page.wait_for_text(ONE, "stacks of the ranks")
    page.wait_for_text(ONE, "in train: time.sleep(0.02)")
    page.screenshot("two_jobs.png")
    kill(page, ONE)
    wait_for_table(page, ONE)
    page.wait_until(lambda: len(bars(page, TWO)) == 2, "the bars of the other job")

    page.save()
    page.reload()
    page.wait_until(lambda: len(bars(page, TWO)) == 2, "two bars after the reload")
    seconds = re.compile(r"running for ([\d:]+)")
    before = seconds.findall(page.text(TWO))
    page.wait_until(lambda: seconds.findall(page.text(TWO)) != before, "the clock to go on")

    page.run(AGAIN)
    page.wait_until(lambda: len(bars(page, AGAIN)) == 2, "two bars in the other cell")
    button(page, AGAIN, "Stop").dblclick()  # this does not interrupt, because the result has arrived
    # The output of this page is replaced; in the output from before the reload, the widgets become the table.
    for cell in (TWO, AGAIN):
        page.wait_for_text(cell, "stopped early on request after")
        page.wait_for_text(cell, "✓ train")
        page.wait_until(lambda cell=cell: len(bars(page, cell)) == 0, "the bars to go")  # type: ignore[misc]
    wait_for_table(page, AGAIN)
    page.screenshot("stopped.png")
    page.run(RESULT)
    page.wait_for_text(RESULT, "True")
