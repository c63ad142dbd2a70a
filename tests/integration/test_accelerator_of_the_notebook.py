"""An Accelerator made in a cell knows the kernel only; in a worker it says so instead of training alone."""

from __future__ import annotations

import pytest

from tests.kernels import Kernel

CELL = """
import torch
from torch.utils.data import DataLoader
from nblaunch import Accelerator, notebook_launcher
accelerator = Accelerator()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""

USES = {
    "prepare": "accelerator.prepare(model, optimizer)",
    "backward": "accelerator.backward(model(torch.ones(1, 2)).sum())",
    "place": "accelerator.process_index",
    "barrier": "accelerator.wait_for_everyone()",
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_it_is_refused_at_the_line_that_uses_it(shared: Kernel, use: str) -> None:
    for how in ("num_processes=2", "engine='inline'"):
        cell = shared.run(
            f"{CELL}\ndef train():\n    return {use}\nnotebook_launcher(train, {how})", raises="RuntimeError"
        )
        assert cell.error is not None
        assert "was made in the notebook" in cell.error.value
        assert "inside the function" in cell.error.value
        assert use in cell.error.text


def test_it_goes_on_in_the_notebook_and_others_work_in_workers(shared: Kernel) -> None:
    cell = shared.run(
        f"""{CELL}
class Ranks:
    def __init__(self, accelerator): self.accelerator = accelerator
    def __len__(self): return 4
    def __getitem__(self, row): return self.accelerator.process_index
def train():
    accelerator = Accelerator()
    rows = [batch.tolist() for batch in DataLoader(Ranks(accelerator), batch_size=4, num_workers=1)]
    return accelerator.num_processes, rows
print(notebook_launcher(train, num_processes=2, return_all=True))
print(accelerator.num_processes, notebook_launcher(train, engine="inline"), accelerator.process_index)
prepared = accelerator.prepare(model)
accelerator.backward(prepared(torch.ones(1, 2)).sum())
"""
    )
    printed = [line for line in cell.stdout.splitlines() if not line.startswith("nblaunch")]
    assert printed == ["[(2, [[0, 0, 0, 0]]), (2, [[1, 1, 1, 1]])]", "1 (1, [[0, 0, 0, 0]]) 0"]


THEIRS = """
import accelerate, torch
from nblaunch import notebook_launcher
theirs = accelerate.Accelerator(cpu=True)
"""


def test_one_of_accelerate_is_told_with_what_to_do(shared: Kernel) -> None:
    cell = shared.run(
        f"{THEIRS}\ndef train():\n    return theirs.prepare(torch.nn.Linear(1, 1))\nnotebook_launcher(train, (), 2)",
        raises="AttributeError",
    )
    assert cell.error is not None
    assert "theirs.prepare(" in cell.error.text
    told = " ".join(cell.error.text.split())
    assert "accelerate.Accelerator that it used was made in the notebook" in told, cell.describe()
    assert "make it inside the function" in told
    assert "train uses theirs of the notebook, an accelerate.Accelerator" in cell.stdout, cell.describe()


def test_one_of_accelerate_among_the_arguments_is_refused(shared: Kernel) -> None:
    for method in ("fork", "spawn"):
        cell = shared.run(
            f"{THEIRS}\nnotebook_launcher(print, (1, theirs), 2, start_method={method!r})",
            raises="ValueError",
        )
        assert cell.error is not None
        assert "args[1] is an accelerate.Accelerator" in cell.error.value
        assert "inside the function" in cell.error.value


def test_one_of_accelerate_that_is_made_in_the_function_is_no_matter(shared: Kernel) -> None:
    cell = shared.run(
        f"""{THEIRS}
def train():
    theirs = accelerate.Accelerator(cpu=True)
    return theirs.num_processes
def inline():
    return theirs.num_processes
notebook_launcher(train, (), 2), notebook_launcher(inline, engine="inline")
"""
    )
    assert cell.value == (2, 1)
    assert "accelerate.Accelerator" not in cell.stdout


def test_other_attribute_errors_are_left_alone(shared: Kernel) -> None:
    cell = shared.run(
        f"{THEIRS}\ndef train():\n    return torch.nosuch\nnotebook_launcher(train, (), 2)",
        raises="AttributeError",
    )
    assert cell.error is not None
    assert "Accelerator" not in cell.error.text
