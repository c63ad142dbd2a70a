"""What was made in a cell takes its place in a worker: Accelerators, states, a Trainer and its arguments."""

from __future__ import annotations

import pytest

from tests.kernels import Kernel

CELL = """
import torch
from torch.utils.data import DataLoader
from nblaunch import Accelerator, PartialState, notebook_launcher
accelerator = Accelerator(gradient_accumulation_steps=2)
state, gradients, partial = accelerator.state, accelerator.gradient_state, PartialState()
accelerator.even_batches = False
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""

TRAIN = """
def train(*own):
    seen = [partial.process_index, accelerator.process_index, accelerator.num_processes]
    wrapped, updater = accelerator.prepare(model, optimizer)
    for _ in range(accelerator.gradient_accumulation_steps):
        accelerator.backward(wrapped(torch.full((1, 2), float(accelerator.process_index))).sum())
    gradient = model.weight.grad[0, 0].item()
    seen += [state.num_processes, gradients.num_steps, accelerator.even_batches, gradient]
    return [*seen, *(one.process_index for one in own)]
"""


@pytest.mark.parametrize("how", ["2", "2, start_method='forkserver'", "2, start_method='spawn'"])
def test_an_accelerator_and_its_states_take_their_place(shared: Kernel, how: str) -> None:
    cell = shared.run(
        f"{CELL}{TRAIN}\nprint(notebook_launcher(train, (accelerator, partial), num_processes={how}, return_all=True))"
        "\nprint(accelerator.process_index, partial.num_processes, accelerator.prepare(model) is model)"
    )
    printed = [line for line in cell.stdout.splitlines() if not line.startswith("nblaunch")]
    # The gradient is the mean of both ranks' inputs, so they train together.
    rows = [[rank, rank, 2, 2, 2, False, 0.5, rank, rank] for rank in (0, 1)]
    assert printed == [str(rows), "0 1 True"]


def test_inline_it_is_another_one_than_the_notebooks(shared: Kernel) -> None:
    cell = shared.run(
        f"""{CELL}
def train():
    accelerator.prepare(model)
    return len(accelerator._models)
print(notebook_launcher(train, engine="inline"), len(accelerator._models))
"""
    )
    assert cell.stdout.splitlines()[-1] == "1 0"


USES = {
    "prepare": "accelerator.prepare(torch.nn.Linear(1, 1))",
    "backward": "accelerator.backward(model(torch.ones(1, 2)).sum())",
    "rank": "accelerator.process_index",
    "barrier": "accelerator.wait_for_everyone()",
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_one_that_has_prepared_objects_is_refused_at_the_line_that_uses_it(shared: Kernel, use: str) -> None:
    prepared = f"{CELL}\naccelerator.prepare(model, optimizer)\ndef train():\n    return {use}\n"
    for how in ("num_processes=2", "engine='inline'"):
        cell = shared.run(f"{prepared}notebook_launcher(train, (), {how})", raises="RuntimeError")
        assert cell.error is not None
        assert "has prepared objects there" in cell.error.value
        assert use in cell.error.text
    shared.run("accelerator.free_memory()")
    shared.run("notebook_launcher(train, (), 2)")


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
