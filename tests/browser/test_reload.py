"""A notebook's page is reloaded while a job runs, or after its end, in JupyterLab with default settings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.lab import Browser, DefaultLab, Page, write_notebook
from tests.browser.panel import SETUP, bars

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

TRAINING, OTHER = 1, 2


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DefaultLab]:
    with DefaultLab(Path(tmp_path_factory.mktemp("lab"))) as lab:
        yield lab


def _open_training(lab: DefaultLab, browser: Browser, name: str, background: bool, other: str) -> Page:
    """Open a new notebook with ``TRAINING`` and the cell ``other``, start training, and wait for its bars."""
    call = f"job = notebook_launcher(train, (100_000,), 2, background={background})"
    write_notebook(lab.folder / name, (SETUP, call, other))
    (lab.folder / "enough").unlink(missing_ok=True)
    page = lab.open(browser, name)
    page.run(0)
    page.wait_until_idle(0)
    page.run(TRAINING)
    page.wait_until(lambda: len(bars(page, TRAINING)) == 2, "two bars")
    return page


@pytest.mark.parametrize("background", [False, True], ids=["blocking", "background"])
def test_a_reload_shows_the_finished_table(lab: DefaultLab, browser: Browser, background: bool) -> None:
    name = f"reload_{background}.ipynb"
    page = _open_training(lab, browser, name, background, "print('free')")
    page.save()
    page.reload()
    page.screenshot(f"reloaded_{background}.png")
    (lab.folder / "enough").touch()
    page.wait_for_text(TRAINING, "done in")
    page.wait_for_matches(TRAINING, "✓ train done in", 1)
    page.screenshot(f"reloaded_done_{background}.png")
    page.run(OTHER)
    page.wait_for_text(OTHER, "free")
    page.save()
    page.page.close()  # the kernel stays
    page = lab.open(browser, name)
    page.wait_for_text(TRAINING, "done in")
    page.wait_for_matches(TRAINING, "✓ train done in", 1)
    page.screenshot(f"reopened_{background}.png")
    page.shut_down()


@pytest.mark.parametrize("background", [False, True], ids=["blocking", "background"])
def test_a_table_appears_although_no_page_was_open(
    lab: DefaultLab, browser: Browser, background: bool
) -> None:
    ended = lab.folder / f"ended_{background}"
    # Check after the kernel has been idle for longer than a reload takes: widgets live as long as the kernel.
    write = f"get_ipython().kernel.io_loop.call_later(6, lambda: open({ended.name!r}, 'w').close())"
    after = f"{'job.result(); ' if background else ''}{write};"
    page = _open_training(lab, browser, f"away_{background}.ipynb", background, after)
    page.run(OTHER)
    page.save()
    url = page.page.url
    page.page.goto("about:blank")
    (lab.folder / "enough").touch()
    page.wait_until(ended.exists, "the end of the job")
    page.goto(url)
    page.wait_for_text(TRAINING, "done in")
    page.wait_for_matches(TRAINING, "✓ train done in", 1)
    page.screenshot(f"away_{background}.png")
    page.shut_down()


def test_table_appears_if_job_ends_during_page_load(lab: DefaultLab, browser: Browser) -> None:
    """A loading page has requested the widgets' states, which reach it after the messages of the job's end."""
    page = _open_training(lab, browser, "loading.ipynb", True, "print('free')")
    page.save()
    held: list[tuple[Any, Any]] = []
    closed: list[Any] = []

    def connect(to_page: Any) -> None:
        def hand_on(message: str | bytes) -> None:
            data = message.encode() if isinstance(message, str) else message
            if b"comm_close" in data:
                closed.append(data)
            if b"update_states" in data:
                held.append((to_page, message))
            else:
                to_page.send(message)

        to_page.connect_to_server().on_message(hand_on)

    page.page.route_web_socket("**/channels*", connect)
    page.reload()
    page.wait_until(lambda: held, "states of widgets")
    (lab.folder / "enough").touch()
    page.wait_until(lambda: closed, "the end of the panel")
    for to_page, message in held:
        to_page.send(message)
    page.wait_for_text(TRAINING, "done in")
    page.wait_for_matches(TRAINING, "✓ train done in", 1)
    page.screenshot("loading.png")
    page.shut_down()
