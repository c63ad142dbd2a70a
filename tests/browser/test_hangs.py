"""A hang in JupyterLab: each row shows the rank's position, rates fall to 0, and the awaited rank is marked."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.browser.lab import Browser, Lab, Page
from tests.browser.panel import HANGS, HEADS, kill, opened, wait_for_table
from tests.browser.themes import photograph

pytestmark = [pytest.mark.slow]

REPORTED, STOPPED = 1, 2
CELLS = (
    HANGS,
    "job = notebook_launcher(train, (), 3, backend='cpu', background=True, hang_timeout_s=5)",
    "notebook_launcher(train, (), 3, backend='cpu', hang_timeout_s=5, on_hang='stop')",
)


@pytest.fixture(scope="module")
def page(lab: Lab, browser: Browser) -> Iterator[Page]:
    with opened(lab, browser, CELLS, "hangs.ipynb") as page:
        yield page


@pytest.mark.thorough
def test_a_hang_is_shown_and_rates_fall_to_0(page: Page) -> None:
    page.run(REPORTED)
    page.wait_until(
        lambda: re.search(r"^all\t\S training\t", page.text(REPORTED), re.MULTILINE), "a training"
    )
    places = page.output(REPORTED).evaluate(HEADS)
    page.wait_for_text(REPORTED, "waiting in all_reduce (cell")
    page.wait_for_text(REPORTED, "no progress for")
    page.wait_until(
        lambda: re.search(r"no progress for \d+ s \(cell 1, line 13\)", page.text(REPORTED)), "the nap's line"
    )
    assert photograph(page, REPORTED, "hang") > 5
    rows = page.output(REPORTED).locator(".nbl-job tr")
    waiting = rows.filter(has_text="waiting in all_reduce (cell 1, line 14)")
    page.wait_until(lambda: waiting.count() == 2, "the two ranks that wait")
    assert "no progress" in rows.nth(1).inner_text()
    page.wait_for_text(REPORTED, "rank 1 has not entered all_reduce, cell 1, line 14")
    assert page.output(REPORTED).evaluate(HEADS)[: len(places)] == places  # no column has moved
    page.wait_until(lambda: re.search(r"\t0\t0(\t|$)", waiting.first.inner_text()), "rates of 0")
    kill(page, REPORTED)
    wait_for_table(page, REPORTED)


@pytest.mark.thorough
def test_the_rank_that_others_wait_for_has_failed(page: Page) -> None:
    page.run(STOPPED)
    page.wait_for_text(STOPPED, "failed in rank 1 after")
    wait_for_table(page, STOPPED)
    page.wait_until_idle(STOPPED)
    page.cell(STOPPED).scroll_into_view_if_needed()
    assert photograph(page, STOPPED, "hang_stopped", is_dark_too=False) > 5
    rows = page.output(STOPPED).locator("table[aria-label^=ranks] tr")
    assert "1 failed, 2 stopped" in rows.nth(1).inner_text()
    shown = {row[0]: row[1:3] for row in map(str.split, rows.all_inner_texts()) if row}
    assert (shown["0"], shown["1"], shown["2"]) == (["■", "stopped"], ["✗", "failed"], ["■", "stopped"])
    # once in the table, and once in the exception
    assert page.text(STOPPED).count("waiting in all_reduce") <= 2
