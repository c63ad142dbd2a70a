"""A training that shows every part of the panel, and what is seen of it in a browser."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nblaunch.dashboard.palette import BAD
from tests.browser.classic import Classic
from tests.browser.lab import Browser, Lab, Page, write_notebook

RANK_BARS = ".jupyter-widgets .nbl-track[aria-label^=rank]:visible"
RED = f"rgb({int(BAD[1:3], 16)}, {int(BAD[3:5], 16)}, {int(BAD[5:7], 16)})"

# Steps of a known length, until the end is requested; no process group, so that a start takes no time. Files in
# the notebook's folder say what the test has seen: "enough" of a training, or that it has "looked" at a failure.
SETUP = """
import os, time
import torch
from torch.utils.data import DataLoader
import nblaunch
from nblaunch import Accelerator, notebook_launcher

def train(num_steps, fails=False):
    accelerator = Accelerator()
    rank = accelerator.process_index
    loader = accelerator.prepare(DataLoader(list(range(num_steps * accelerator.num_processes)), batch_size=1))
    try:
        for step, batch in enumerate(loader):
            time.sleep(0.02)
            if step % 10 == 0:
                print(f"rank {rank} at step {step} <b>not bold</b>")
            if fails and rank == 1 and step == 150:  # the lines are seen
                raise ValueError("the loss of <i>this</i> rank is nan")
            if accelerator.should_stop or os.path.exists("enough"):
                break
    finally:
        while fails and rank != 1 and not os.path.exists("looked"):
            time.sleep(0.02)
    return step
"""

# Rank 1 leaves the loop for a nap in the middle of training; the others wait for it in a collective.
HANGS = """
import time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from nblaunch import Accelerator, notebook_launcher

def train():
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(list(range(10_000)), batch_size=1))
    for step, batch in enumerate(loader):
        time.sleep(0.02)
        if step == 100 and accelerator.process_index == 1:
            time.sleep(1000)
        dist.all_reduce(torch.ones(1))
"""


# The heads of the table of a job that runs, or has ended, with their places in pixels.
HEADS = """
output => [...output.querySelector(":is(.nbl-job, .jp-RenderedHTMLCommon) table")
    .querySelectorAll("[role=columnheader]")]
    .map(head => [head.innerText, Math.round(head.getBoundingClientRect().left)])
"""


def bars(page: Page, cell: int) -> list[float]:
    """How far the progress bars below a cell are, in percent; those of ranks."""
    script = "bars => bars.map(bar => parseFloat(bar.firstChild.style.width) || 0)"
    return page.output(cell).locator(RANK_BARS).evaluate_all(script)  # type: ignore[no-any-return]


def have_advanced(page: Page, cell: int, samples: list[list[float]], num_bars: int = 4) -> bool:
    """Look at the bars once more; whether each was by now seen at four values."""
    sample = bars(page, cell)
    if len(sample) == num_bars:
        samples.append(sample)
    return all(len(set(values)) >= 4 for values in zip(*samples, strict=True)) if samples else False


def button(page: Page, cell: int, name: str) -> Any:
    return page.output(cell).get_by_role("button", name=name, exact=True)


def kill(page: Page, cell: int) -> None:
    """Kill the job of a cell by its buttons, and wait until it says so."""
    button(page, cell, "Kill").click()
    button(page, cell, "Confirm kill").click(delay=600)  # not a double click
    page.wait_for_text(cell, "cancelled after")


def num_widgets(page: Page, cell: int) -> int:
    return page.output(cell).locator(".jupyter-widgets").count()


def wait_for_table(page: Page, cell: int) -> None:
    """Wait until the table of an ended job has taken the place of its widgets."""
    page.wait_until(lambda: num_widgets(page, cell) == 0, f"the widgets of cell {cell} to go")


def show_lines_of(page: Page, cell: int, rank: int, other: int) -> None:
    """Click on the tab of ``rank``, which works while the cell runs, and wait until lines of ``other`` are gone."""
    # Not any text: where the rank has failed by then, others name it.
    tabs = page.output(cell).locator("[class*=TabBar-tabLabel]")
    tabs.filter(has_text=re.compile(rf"^rank {rank}$")).click()
    page.wait_for_text(cell, f"rank {rank} at step 10 <b>not bold</b>")
    page.wait_until(lambda: f"rank {other} at step" not in page.text(cell), f"lines of rank {rank} alone")


def wait_for_red_bar(page: Page, cell: int, rank: int) -> None:
    bar = page.output(cell).locator(RANK_BARS).nth(rank)
    color = "bar => getComputedStyle(bar.firstChild).backgroundColor"
    page.wait_until(lambda: bar.evaluate(color) == RED, f"a red bar of rank {rank}")


def saved_outputs(page: Page, cell: int) -> tuple[Any, list[Any]]:
    """Save; returns the notebook's metadata and what a cell's outputs hold in the file."""
    saved = page.save()
    return saved.metadata, [dict(output.get("data", output)) for output in saved.cells[cell].outputs]


def num_saved_widgets(metadata: Any) -> int:
    """Return how many widgets a saved notebook has the state of, in the form without which GitHub does not show it."""
    return sum(len(part["state"]) for part in metadata.get("widgets", {}).values())


@contextmanager
def opened(
    server: Lab | Classic, browser: Browser, cells: Sequence[str], name: str = "jobs.ipynb"
) -> Iterator[Page]:
    """A notebook with these cells, the first of them run; its kernel ends with the block."""
    write_notebook(server.folder / name, cells)
    page = server.open(browser, name)
    page.run(0)
    page.wait_until_idle(0)
    yield page
    page.shut_down()
