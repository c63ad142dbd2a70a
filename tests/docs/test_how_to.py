"""The code blocks of the how-to pages run after the tutorial's blocks."""

from __future__ import annotations

import pytest

from tests.architecture.source import ROOT
from tests.kernels import Kernel
from tests.test_readme import blocks

BLOCKS = """
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(20, 64), torch.nn.Linear(64, 20)
    def forward(self, batch):
        return self.down(torch.relu(self.up(batch)))

class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
    def forward(self, batch):
        return self.blocks[1](self.blocks[0](batch))

model = Blocks()
"""
EPOCH = """
def train_one_epoch(model, loader):
    for batch, wanted in loader:
        loss = cross_entropy(model(batch), wanted)
    return loss.item()

loader = DataLoader(dataset, batch_size=32)
"""
FAILS = """
def train(model=None):
    rank = Accelerator().process_index
    batch = torch.ones(8 - rank, 20)
    if rank == 1:
        raise ValueError("boom")
    torch.distributed.all_reduce(batch)
"""


def python_of(page: str) -> list[str]:
    """Return the Python blocks of a page, except blocks that show code before a change."""
    code = [code for language, code in blocks(ROOT / "docs" / f"{page}.md") if language == "python"]
    return [block for block in code if not block.startswith("# before")]


DATA_AND_MODEL, TRAIN, *_ = python_of("tutorial")

GIVEN = {
    "from-accelerate": (TRAIN, BLOCKS, DATA_AND_MODEL + TRAIN),
    "from-multiprocessing": ("",),
    "jupyterlab": ("", "", "result = job.result()"),
    "sessions": (EPOCH, "", ""),
}
"""Page -> code to run before each of its blocks, which the page assumes."""


@pytest.fixture
def taught(kernel: Kernel) -> Kernel:
    """Start a kernel with the tutorial's data, model and training function."""
    kernel.run(DATA_AND_MODEL + TRAIN)
    return kernel


@pytest.mark.parametrize("page", GIVEN)
def test_pages_run_unchanged(taught: Kernel, page: str) -> None:
    for given, block in zip(GIVEN[page], python_of(f"how-to/{page}"), strict=True):
        taught.run(given)
        taught.run(block)
    if page == "sessions":
        taught.run("%ranks stop")


def test_the_debugger_page_runs_unchanged(taught: Kernel) -> None:
    in_cell, after_job, after_command = python_of("how-to/debugging")
    taught.run(FAILS)
    taught.run(in_cell, raises="ValueError")
    cell = taught.submit(after_job, is_typed_into=True)
    cell.type("p batch.shape")
    cell.type("q")
    assert "torch.Size([7, 20])" in cell.wait().stdout, cell.describe()
    assert cell.status == "ok", cell.describe()
    taught.run("session = nblaunch.Session(num_processes=2)")
    taught.run("session.run(train)", raises="ValueError")
    cell = taught.submit(after_command, is_typed_into=True)
    cell.type("q")
    assert cell.wait().status == "ok", cell.describe()
    taught.run("session.close()")


def test_the_detached_jobs_page_runs_unchanged(taught: Kernel) -> None:
    launch, later = python_of("how-to/detached-jobs")
    taught.run("build_model = lambda: torch.nn.Sequential(*model)")
    taught.run("%env NBLAUNCH_NUM_PROCESSES=3")  # it inspects rank 2
    name = taught.run(launch).value
    taught.run(later.replace("train-3f9a2c", name))
    taught.run("assert model(inputs).argmax(dim=1).eq(labels).float().mean() > 0.9")
