"""A training run that shows every part of the panel, and queries of the panel in a browser."""

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

# Steps of a known length until the test requests the end; no process group, so that the start is fast. The test signals
# by files in the notebook's folder: "enough" ends training, "looked" lets a failure end.
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

# Rank 1 sleeps in the middle of training; the others wait for it in a collective.
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


# The headers of the table of a running or ended job, with their positions in pixels.
HEADS = """
output => [...output.querySelector(":is(.nbl-job, .jp-RenderedHTMLCommon) table")
    .querySelectorAll("[role=columnheader]")]
    .map(head => [head.innerText, Math.round(head.getBoundingClientRect().left)])
"""


def bars(page: Page, cell: int) -> list[float]:
    """Return the progress in percent of the ranks' bars below a cell."""
    script = "bars => bars.map(bar => parseFloat(bar.firstChild.style.width) || 0)"
    return page.output(cell).locator(RANK_BARS).evaluate_all(script)  # type: ignore[no-any-return]


def have_advanced(page: Page, cell: int, samples: list[list[float]], num_bars: int = 4) -> bool:
    """Read the bars once more; return whether each bar has had four different values so far."""
    sample = bars(page, cell)
    if len(sample) == num_bars:
        samples.append(sample)
    return all(len(set(values)) >= 4 for values in zip(*samples, strict=True)) if samples else False


def button(page: Page, cell: int, name: str) -> Any:
    return page.output(cell).get_by_role("button", name=name, exact=True)


def kill(page: Page, cell: int) -> None:
    """Kill the job of a cell with its buttons, and wait until the panel says so."""
    button(page, cell, "Kill").click()
    button(page, cell, "Confirm kill").click(delay=600)  # not a double click
    page.wait_for_text(cell, "cancelled after")


def num_widgets(page: Page, cell: int) -> int:
    return page.output(cell).locator(".jupyter-widgets").count()


def wait_for_table(page: Page, cell: int) -> None:
    """Wait until the table of an ended job has replaced its widgets."""
    page.wait_until(lambda: num_widgets(page, cell) == 0, f"the widgets of cell {cell} to go")


def show_lines_of(page: Page, cell: int, rank: int, other: int) -> None:
    """Click on the tab of ``rank`` while the cell runs, and wait until lines of ``other`` are gone."""
    # Match whole labels only: if the rank has failed, other lines name it.
    tabs = page.output(cell).locator("[class*=TabBar-tabLabel]")
    tabs.filter(has_text=re.compile(rf"^rank {rank}$")).click()
    line = re.compile(rf"rank {rank} at step \d+ <b>not bold</b>")  # the tab shows only the last lines
    page.wait_until(lambda: line.search(page.text(cell)), f"lines of rank {rank}")
    page.wait_until(lambda: f"rank {other} at step" not in page.text(cell), f"lines of rank {rank} alone")


def wait_for_red_bar(page: Page, cell: int, rank: int) -> None:
    bar = page.output(cell).locator(RANK_BARS).nth(rank)
    color = "bar => getComputedStyle(bar.firstChild).backgroundColor"
    page.wait_until(lambda: bar.evaluate(color) == RED, f"a red bar of rank {rank}")


def saved_outputs(page: Page, cell: int) -> tuple[Any, list[Any]]:
    """Save; return the notebook's metadata and a cell's outputs from the file."""
    saved = page.save()
    return saved.metadata, [dict(output.get("data", output)) for output in saved.cells[cell].outputs]


def num_saved_widgets(metadata: Any) -> int:
    """Return the number of widgets in a saved notebook's state, after checking the format that GitHub requires."""
    return sum(len(part["state"]) for part in metadata.get("widgets", {}).values())


@contextmanager
def opened(
    server: Lab | Classic, browser: Browser, cells: Sequence[str], name: str = "jobs.ipynb"
) -> Iterator[Page]:
    """Open a notebook with these cells and run the first one; its kernel ends with the block."""
    write_notebook(server.folder / name, cells)
    page = server.open(browser, name)
    page.run(0)
    page.wait_until_idle(0)
    yield page
    page.shut_down()
