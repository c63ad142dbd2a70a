"""The dashboard with ipywidgets 7.7, Colab's version, in JupyterLab 3 and in the classic notebook.

Kernel and server come from ``make colab-env``. The tests write pictures of each stage to ``artifacts/browser``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import nbformat
import pytest

from tests.browser.classic import Classic
from tests.browser.lab import Browser, Lab, Page
from tests.browser.panel import (
    HANGS,
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
from tests.profiles import python_of
from tests.thorough import thorough

FRONT_ENDS: dict[str, type[Lab] | type[Classic]] = {"lab3": Lab, "classic": Classic}
VERSIONS = """
import importlib.metadata as m
print(*(m.version(name) for name in ("ipykernel", "ipython", "ipywidgets", "jupyterlab", "notebook")))
"""

FIRST, STOPPED, RESULT, FAILING, SECOND, RELOADED, BLOCKED, HANGING_SETUP, HANGING = range(1, 10)
CELLS = (
    SETUP + VERSIONS,
    "notebook_launcher(train, (10_000,), 2)",
    "job = notebook_launcher(train, (100_000,), 2, background=True)",
    "0 < job.result() < 99_999",
    "notebook_launcher(train, (1000, True), 2, interrupt_grace_s=60)",
    "notebook_launcher(train, (50,), 2)",
    "job = notebook_launcher(train, (100_000,), 2, background=True)",
    "notebook_launcher(train, (100_000,), 2)",
    HANGS,
    "job = notebook_launcher(train, (), 3, backend='cpu', background=True, hang_timeout_s=5)",
)

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module", params=[thorough("lab3"), "classic"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lab | Classic]:
    with FRONT_ENDS[request.param](tmp_path_factory.mktemp(request.param), python_of("colab")) as server:
        yield server


@pytest.fixture(scope="module")
def page(server: Lab | Classic, browser: Browser) -> Iterator[Page]:
    """Open a notebook with these cells and run the first one."""
    with opened(server, browser, CELLS) as page:
        assert page.text(0).split() == ["6.17.1", "7.34.0", "7.7.1", "3.5.3", "6.5.7"]
        yield page


def picture(server: Lab | Classic, stage: str) -> str:
    return f"{'lab3' if isinstance(server, Lab) else 'classic'}_{stage}.png"


def test_bars_advance_while_the_cell_runs_and_a_table_stays(server: Lab | Classic, page: Page) -> None:
    page.run(FIRST)
    samples: list[list[float]] = []
    page.wait_until(lambda: have_advanced(page, FIRST, samples, 2), "each bar at four values")
    assert page.is_running(FIRST), f"the training was too short to be seen: {samples}"
    show_lines_of(page, FIRST, rank=1, other=0)
    page.screenshot(picture(server, "live"))
    (server.folder / "enough").touch()
    page.wait_for_text(FIRST, "done in")
    wait_for_table(page, FIRST)
    page.wait_for_matches(FIRST, "✓ train done in", 1)
    page.wait_until_idle(FIRST)
    page.screenshot(picture(server, "done"))
    (server.folder / "enough").unlink()


def test_a_double_click_on_stop_ends_the_job(server: Lab | Classic, page: Page) -> None:
    page.run(STOPPED)
    page.wait_for_text(STOPPED, "rank 1 at step ")
    button(page, STOPPED, "Stacks").click()
    page.wait_for_text(STOPPED, "in train: time.sleep(0.02)")
    page.screenshot(picture(server, "stacks"))
    button(page, STOPPED, "Stop").dblclick()
    page.wait_for_text(STOPPED, "stopped early on request after")
    wait_for_table(page, STOPPED)
    page.screenshot(picture(server, "stopped"))
    page.run(RESULT)
    page.wait_for_text(RESULT, "True")


def test_a_failing_rank_turns_red_and_the_next_launch_is_good(server: Lab | Classic, page: Page) -> None:
    page.run(FAILING)
    page.wait_for_text(FAILING, "ValueError: the loss of <i>this</i> rank is nan")
    # This is still the live view: the widgets report the failure, and the other rank ends only on request.
    assert num_widgets(page, FAILING) > 0
    page.wait_for_matches(FAILING, r"^1\s+✗ failed", 1)
    wait_for_red_bar(page, FAILING, rank=1)
    (server.folder / "looked").touch()
    page.wait_for_text(FAILING, "failed in rank 1 after")
    wait_for_table(page, FAILING)
    page.wait_until_idle(FAILING)  # cells that are submitted before this one has failed are not executed
    page.screenshot(picture(server, "failed"))
    page.run(SECOND)
    page.wait_for_text(SECOND, "done in")
    page.wait_for_text(SECOND, "50 steps")
    page.wait_for_text(SECOND, "ranks 0 and 1 alike")
    page.wait_until_idle(SECOND)


def test_the_saved_notebook_opens_with_its_tables(
    server: Lab | Classic, page: Page, browser: Browser
) -> None:
    metadata, outputs = saved_outputs(page, FIRST)
    # the text of each job, for pages that are opened after its end
    assert num_saved_widgets(metadata) <= 5 * 4
    assert {"text/html", "text/plain"} in [set(output) for output in outputs]
    # Change the file, so that its signature is invalid: the browser then sanitises its outputs, as for a stranger's
    # notebook.
    notebook = nbformat.read(server.folder / "jobs.ipynb", as_version=4)
    notebook.cells.append(nbformat.v4.new_markdown_cell("from another user"))
    nbformat.write(notebook, server.folder / "sent.ipynb")
    sent = server.open(browser, "sent.ipynb")
    try:
        for cell, text in (
            (FIRST, "done in"),
            (STOPPED, "stopped early on request"),
            (FAILING, "failed in rank 1"),
        ):
            sent.wait_for_text(cell, text)
        sent.wait_for_matches(FIRST, "✓ train done in", 1)
        assert sent.page.locator(".jupyter-widgets").count() == 0
        sent.cell(FIRST).scroll_into_view_if_needed()
        sent.screenshot(picture(server, "sent"))
    finally:
        sent.shut_down()


@pytest.mark.thorough
def test_a_job_and_its_buttons_survive_a_reload(page: Page) -> None:
    page.run(RELOADED)
    page.wait_until(lambda: len(bars(page, RELOADED)) == 2, "two bars")
    page.save()
    page.reload()
    page.wait_until(lambda: len(bars(page, RELOADED)) == 2, "two bars after the reload")
    # The page shows saved outputs before it is connected to the kernel; a click would then have no effect.
    shown = page.text(RELOADED)
    page.wait_until(lambda: page.text(RELOADED) != shown, "the widgets to be live")
    button(page, RELOADED, "Stop").click()
    # This page does not know that the output belongs to the job, so the widgets themselves become the table.
    page.wait_for_text(RELOADED, "stopped early on request after")
    page.wait_for_text(RELOADED, "✓ train")
    page.wait_until(lambda: len(bars(page, RELOADED)) == 0, "the bars to go")


@pytest.mark.thorough
def test_a_reload_shows_the_table_of_a_finished_cell(server: Lab | Classic, page: Page) -> None:
    page.run(BLOCKED)
    page.wait_until(lambda: len(bars(page, BLOCKED)) == 2, "two bars")
    page.save()
    page.reload()
    (server.folder / "enough").touch()
    page.wait_for_text(BLOCKED, "done in")
    page.wait_for_matches(BLOCKED, "✓ train done in", 1)
    page.screenshot(picture(server, "reloaded"))


@pytest.mark.thorough
def test_a_hang_is_shown_in_its_cell(server: Lab | Classic, page: Page) -> None:
    page.run(HANGING_SETUP)
    page.wait_until_idle(HANGING_SETUP)
    page.run(HANGING)
    page.wait_for_text(HANGING, "waiting in all_reduce (cell")
    page.wait_for_text(HANGING, "no progress for")
    page.screenshot(picture(server, "hang"))
    kill(page, HANGING)


@pytest.mark.thorough
def test_a_restarted_kernel_leaves_a_table_without_errors(server: Lab | Classic, page: Page) -> None:
    (server.folder / "enough").unlink()
    page.run(0)
    page.wait_until_idle(0)
    page.run(RELOADED)
    lasting = page.output(RELOADED).locator("[class$=-lasting]")
    page.wait_until(lambda: "running for" in (lasting.text_content() or ""), "the lasting table")
    page.save()
    page.restart_kernel()
    page.wait_until(lasting.is_visible, "the lasting table to be seen")
    page.save()
    page.reload()
    page.wait_for_text(RELOADED, "last known at")
    error = page.output(RELOADED).get_by_text(re.compile("model not found|could not be displayed"))
    page.wait_until(lambda: error.count() == 1, "the front end's error about the widgets")
    assert not error.is_visible()
    page.screenshot(picture(server, "restarted"))
