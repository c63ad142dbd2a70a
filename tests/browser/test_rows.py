"""Rows in JupyterLab: they are updated, keep their positions, and are legible in both themes.

Jobs are simulated: a cell feeds the dashboard with readings, and no worker is started.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.browser.lab import Browser, Lab, Page
from tests.browser.panel import HEADS, opened, wait_for_table
from tests.browser.themes import photograph
from tests.dashboard.feed import FEED

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

# Files in the notebook's folder end a job, or make its last rank slow.
DRIVE = (
    FEED
    + """
import os

def drive(cell, num_ranks, kind="auto", prints=False):
    board, tick, start_s = dashboard.choose(kind), threading.Event(), time.monotonic()
    emit(board, begin(num_ranks))
    step, own = 0, 0.0
    while not os.path.exists(f"seen_{cell}") and time.monotonic() - start_s < 120:
        step, own = step + 1, own + (0.25 if os.path.exists("slow") else 1)
        curve = LossCurve(min(step, 60), 1, tuple(1 / (i + 1) for i in range(min(step, 60))))
        steps = [step] * (num_ranks - 1) + [int(own)]
        look(board, [SlotReading(rank, WorkerState.TRAINING, done, 2000, epoch=1, num_epochs=3, samples=done * 32,
                                 loss=1 / step, losses=curve, step_time_s=time.monotonic(), loop=1, steps_done=done)
                     for rank, done in enumerate(steps)])
        if step % 10 == 0:
            emit(board, [HostMemory(rank, time.time(), 800_000_000) for rank in range(num_ranks)])
        if prints:
            emit(board, [LogLines(rank, time.time(), (f"rank {rank} at step {step}",)) for rank in range(num_ranks)])
        tick.wait(0.1)
    emit(board, end(num_ranks))
    close(board)
"""
)
EIGHT, TWO, SLOW, HTML, TWENTY = range(1, 6)
CELLS = (
    DRIVE,
    f"drive({EIGHT}, 8)",
    f"drive({TWO}, 2)",
    f"drive({SLOW}, 8, prints=True)",
    f"drive({HTML}, 3, 'html', True)",
    f"drive({TWENTY}, 20)",
)

# Whether each text of a cell is visible; in a single call, because rows are replaced several times a second.
FITS = """
output => [...output.querySelectorAll("[role=columnheader]")]
    .filter(head => head.checkVisibility())
    .every(head => head.getBoundingClientRect().right <= output.getBoundingClientRect().right + 1)
"""
# Whether only the part of the page with the table scrolls sideways.
SCROLLS = """
output => {
    const table = output.querySelector(".nbl-job table");
    let part = table;
    while (part !== output && part.scrollWidth <= part.clientWidth) part = part.parentElement;
    return part !== output && ["auto", "scroll"].includes(getComputedStyle(part).overflowX);
}
"""


@pytest.fixture(scope="module")
def page(lab: Lab, browser: Browser) -> Iterator[Page]:
    with opened(lab, browser, CELLS, "rows.ipynb") as page:
        yield page


@contextmanager
def driven(lab: Lab, page: Page, cell: int) -> Iterator[None]:
    """Run a simulated job in ``cell``, and end it with the block."""
    page.run(cell)
    try:
        page.wait_for_text(cell, "training")
        yield
    finally:
        (lab.folder / f"seen_{cell}").touch()
        page.wait_until_idle(cell)


def test_eight_ranks_have_moving_rows(lab: Lab, page: Page) -> None:
    output = page.output(EIGHT)
    rows = output.locator(".nbl-job tr", has=page.page.locator("[role=rowheader]"))
    with driven(lab, page, EIGHT):
        page.wait_until(lambda: rows.count() == 9, "a row for the job and one for each rank")
        before = rows.last.inner_text()
        page.wait_until(lambda: rows.last.inner_text() != before, "newer numbers")
        page.wait_until(lambda: output.locator("svg[role=img]").count(), "the charts")
        page.screenshot("rows_of_eight.png", output)
    page.wait_for_text(EIGHT, "done in")
    wait_for_table(page, EIGHT)
    page.screenshot("rows_of_eight_done.png", output)


def test_nothing_moves_between_the_start_and_the_end(lab: Lab, page: Page) -> None:
    output = page.output(TWO)
    with driven(lab, page, TWO):
        page.wait_until(lambda: output.locator("svg[role=img]").count(), "the charts")
        page.wait_for_text(TWO, "800 MB")
        places = [output.evaluate(HEADS)]
        heights = {output.bounding_box()["height"]}  # type: ignore[index]
        seen = set()

        def look() -> bool:
            places.append(output.evaluate(HEADS))
            heights.add(output.bounding_box()["height"])  # type: ignore[index]
            seen.update(re.findall(r"running for (\d+) s", page.text(TWO)))
            return len(seen) >= 5

        page.wait_until(look, "five seconds of the job")
        assert len(heights) == 1
        assert all(place == places[0] for place in places)
        assert [name for name, _ in places[0]] == [
            "rank", "state", "progress", "epoch", "step", "steps/s", "samples/s", "ETA", "loss", "peak memory"
        ]  # fmt: skip
        assert "nothing printed" not in page.text(TWO)  # a silent job has no empty pane
        assert output.evaluate(FITS)
    page.wait_for_text(TWO, "done in")
    wait_for_table(page, TWO)
    assert "ETA" not in page.text(TWO)


def test_differing_rank_moves_no_column(lab: Lab, page: Page) -> None:
    output = page.output(SLOW)
    with driven(lab, page, SLOW):
        page.wait_for_text(SLOW, "800 MB")
        before = output.evaluate(HEADS)
        (lab.folder / "slow").touch()
        page.wait_for_text(SLOW, "1 differs")
        assert output.evaluate(HEADS) == before
        page.page.set_viewport_size({"width": 560, "height": 900})
        page.wait_until(lambda: not output.evaluate(FITS), "the table to be wider than the cell")
        assert output.evaluate(SCROLLS)
        cut = "tabs => tabs.filter(tab => tab.firstChild.scrollWidth > tab.firstChild.clientWidth + 1).length"
        tabs = output.locator("[role=tab]")
        page.wait_until(lambda: tabs.count() == 9, "the tabs of the lines")
        assert tabs.evaluate_all(cut) == 0
        page.screenshot("rows_narrow.png", output)
        page.page.set_viewport_size({"width": 1000, "height": 900})
    (lab.folder / "slow").unlink()


def test_an_html_table_stays_in_sight_while_ranks_print(lab: Lab, page: Page) -> None:
    output = page.output(HTML)

    def last_step() -> int:
        return max(map(int, re.findall(r"rank \d at step (\d+)", page.text(HTML))), default=0)

    with driven(lab, page, HTML):
        page.wait_until(lambda: last_step() >= 20, "a full pane")
        page.wait_for_text(HTML, "800 MB")
        height, first = output.bounding_box()["height"], last_step()  # type: ignore[index]
        page.wait_until(lambda: last_step() >= first + 10, "more lines")
        assert output.bounding_box()["height"] == height  # type: ignore[index]
        page.screenshot("rows_html.png", output)
    page.wait_for_text(HTML, "done in")
    page.wait_for_text(HTML, "[1] rank 1 at step 2\n")  # all lines follow


def test_text_is_legible_in_both_themes(lab: Lab, page: Page) -> None:
    with driven(lab, page, TWENTY):
        page.wait_for_text(TWENTY, "ranks 0-19 training")
        assert photograph(page, TWENTY, "rows_of_twenty") > 15
