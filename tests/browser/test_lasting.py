"""The lasting output of a job: after its kernel has died, its height, and its number of lines."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from tests.browser.lab import Browser, Lab, Page
from tests.browser.panel import bars, opened, saved_outputs
from tests.browser.themes import photograph

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

SETUP = """
import os, time
import torch
from torch.utils.data import DataLoader, TensorDataset
from nblaunch import Accelerator, notebook_launcher

def train(num_epochs):
    accelerator = Accelerator()
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = DataLoader(TensorDataset(torch.randn(320, 4)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range(num_epochs):
        for step, (batch,) in enumerate(loader):
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)
            if step % 5 == 0:
                print(f"rank {accelerator.process_index} at step {step}")
        accelerator.log({"accuracy": epoch / 10}, step=epoch)

def chatter():
    for number in range(2000):
        print(f"rank {os.environ['RANK']} says {number}")
"""
DYING, GROWING, CHATTER = 1, 2, 3
CELLS = (
    SETUP,
    "job = notebook_launcher(train, (100,), 2, background=True)",
    "notebook_launcher(train, (12,), 4)",
    "notebook_launcher(chatter, (), 4)",
)


@pytest.fixture(scope="module")
def page(lab: Lab, browser: Browser) -> Iterator[Page]:
    with opened(lab, browser, CELLS, "lasting.ipynb") as page:
        yield page


def test_the_output_keeps_its_height(page: Page) -> None:
    page.run(GROWING)
    output = page.output(GROWING)
    heights: list[tuple[float, float]] = []
    page.wait_until(lambda: len(bars(page, GROWING)) == 4, "four bars")

    def look() -> bool:
        box = output.bounding_box()
        heights.append((time.monotonic(), box["height"] if box else 0.0))
        return re.search(r"epoch ([2-9]|1\d) of 12", page.text(GROWING)) is not None

    page.wait_until(look, "the second epoch")
    assert photograph(page, GROWING, "growing_live", is_dark_too=False) > 5
    last = heights[-1][1]
    assert last < 640
    first_s = heights[0][0]
    assert max(height for at_s, height in heights if at_s < first_s + 1.5) > 0.5 * last
    page.wait_for_text(GROWING, "done in")
    page.wait_until_idle(GROWING)
    assert photograph(page, GROWING, "growing_done", is_dark_too=False) > 5
    _, outputs = saved_outputs(page, GROWING)
    assert not any("widget-view" in name for one in outputs for name in one)


def test_many_lines_are_folded(page: Page) -> None:
    page.run(CHATTER)
    page.wait_for_text(CHATTER, "done in")
    page.wait_until_idle(CHATTER)
    page.wait_for_text(CHATTER, "more lines")
    lines = [line for line in page.text(CHATTER).splitlines() if " says " in line]
    assert 40 <= len(lines) <= 60
    page.screenshot("many_lines.png", page.output(CHATTER))
    page.output(CHATTER).locator("summary", has_text="more lines").click()
    page.wait_until(lambda: page.text(CHATTER).count(" says ") > 200, "all lines")


def test_a_restarted_kernel_leaves_the_last_known_table(page: Page) -> None:
    page.run(DYING)
    output = page.output(DYING)
    page.wait_until(lambda: len(bars(page, DYING)) == 2, "two bars")
    lasting = output.locator("[class$=-lasting]")
    page.wait_until(
        lambda: re.search(r"epoch ([2-9]|\d\d) of 100", lasting.text_content() or ""), "the second epoch", 90
    )
    assert not lasting.is_visible()
    page.save()
    page.restart_kernel()
    page.wait_until(lasting.is_visible, "the lasting table")
    assert photograph(page, DYING, "kernel_restarted") > 5
    assert "last known at" in page.text(DYING)
    assert re.search(r"epoch \d+ of 100 · \d+ %", page.text(DYING))
    assert lasting.locator("svg[role=img]").first.is_visible()
    assert output.locator(".jupyter-widgets-disconnected:visible").count() == 0
    page.save()
    page.reload()
    page.wait_for_text(DYING, "last known at")
    error = page.output(DYING).get_by_text("model not found")
    page.wait_until(lambda: error.count() == 1, "JupyterLab's error about the widgets")
    assert not error.is_visible()
    assert photograph(page, DYING, "kernel_restarted_reloaded", is_dark_too=False) > 5
