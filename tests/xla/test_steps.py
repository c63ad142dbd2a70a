"""Graphs that training steps compile, and reports about them (PJRT CPU)."""

from __future__ import annotations

import re

import pytest

from tests.kernels import Cell, Kernel

pytestmark = [pytest.mark.usefixtures("compile_quickly")]

LOOP = """
torch.manual_seed(0)
x, y = torch.randn(96, 8), torch.randint(0, 4, (96,))

def graphs():
    return metrics().counter_value("UncachedCompile") or 0

def train(model, num_steps=5, batch=32, evaluates=()):
    accelerator = Accelerator()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    rows = batch * num_steps * accelerator.num_processes
    data = TensorDataset(x.repeat(9, 1)[:rows], y.repeat(9)[:rows])
    loader = DataLoader(data, batch_size=batch)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    counts = []
    for inputs, targets in loader:
        before = graphs()
        loss = F.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        counts.append(graphs() - before)
    model.eval()
    for sizes in evaluates:
        batches = [torch.arange(size) for size in sizes]
        test_loader = accelerator.prepare(DataLoader(TensorDataset(x), batch_sampler=batches))
        for (inputs,) in test_loader:
            with torch.no_grad():
                output = model(inputs).argmax(-1)
    accelerator.wait_for_everyone()
    return counts, graphs()
"""


@pytest.fixture(scope="module")
def stepping(shared: Kernel) -> Kernel:
    shared.run(LOOP)
    return shared


def launch(kernel: Kernel, arguments: str, num_processes: int = 1) -> Cell:
    return kernel.run(
        f"notebook_launcher(lambda m: train(m, {arguments}), (nn.Linear(8, 4),), {num_processes}, dashboard='text')",
    )


def test_only_the_first_two_steps_compile(stepping: Kernel) -> None:
    """The optimizer's state appears in the first step and is an input of the second. A new rate compiles nothing."""
    cell = launch(stepping, "num_steps=6")
    counts, total = cell.value
    assert counts == [1, 1, 0, 0, 0, 0]
    assert total == 2
    assert "nblaunch: training: 2 graphs compiled in" in cell.stdout
    assert "for batches of 32x8, 32" in cell.stdout
    assert "new graph" not in cell.stdout
    assert "item()" not in cell.stdout, "what nblaunch reads by itself must not count as the user's"


def test_several_processes_cut_each_step_in_two(stepping: Kernel) -> None:
    """Gradients go through the host here: one graph ends with the gradients, another begins with their averages."""
    counts, total = launch(stepping, "num_steps=4", num_processes=2).value
    assert counts[2:] == [0, 0]
    assert total == sum(counts) <= 4


def test_a_batch_of_another_size_is_named(stepping: Kernel) -> None:
    cell = launch(stepping, "evaluates=[(32, 32, 32, 7, 7, 32)]")
    _, total = cell.value
    assert total == 2 + 2
    assert "nblaunch: evaluating: 1 graph compiled in" in cell.stdout
    assert "nblaunch: evaluating step 4 compiled 1 new graph in" in cell.stdout
    assert "its batch is 7x8, but the others are 32x8" in cell.stdout
    assert "even_batches=True" in cell.stdout
    assert cell.stdout.count("new graph") == 1, "once per cause"


def test_the_head_of_the_table_counts_compilations(stepping: Kernel) -> None:
    cell = stepping.run(
        "notebook_launcher(lambda m: train(m, num_steps=6), (nn.Linear(8, 4),), 1, dashboard='html')",
    )
    _, total = cell.value
    head = cell.displays[0].data["text/plain"]
    assert re.search(rf"on 1 process \(xla, fork, {total} graphs compiled in \d+\.\d s\)", head), head


def test_the_last_batch_is_completed(stepping: Kernel) -> None:
    cell = stepping.run(
        """
def count(model):
    accelerator = Accelerator()
    loader = DataLoader(TensorDataset(x[:70]), batch_size=32)
    model, loader = accelerator.prepare(model, loader)
    shapes, seen = [], 0
    for (inputs,) in loader:
        with torch.no_grad():
            output = accelerator.gather_for_metrics(model(inputs))
        shapes.append(tuple(inputs.shape))
        seen += len(output)
    return shapes, seen
notebook_launcher(count, (nn.Linear(8, 4),), 1)
""",
    )
    assert cell.value == ([(32, 8)] * 3, 70)


def test_changes_in_the_loop_are_named(stepping: Kernel) -> None:
    cell = stepping.run(
        """
def grow(model):
    accelerator = Accelerator()
    loader = DataLoader(TensorDataset(x), batch_size=6)
    model, loader = accelerator.prepare(model, loader)
    model.eval()
    for number, (inputs,) in enumerate(loader):
        with torch.no_grad():
            output = model(inputs)
            for _ in range(number):              # a graph that grows
                output = torch.tanh(output)
notebook_launcher(grow, (nn.Linear(8, 4),), 1, dashboard="text")
""",
    )
    assert "evaluating: 10 steps compiled new graphs although the batch shape did not change" in cell.stdout


def test_an_operation_that_runs_on_the_cpu_is_named(stepping: Kernel) -> None:
    cell = stepping.run(
        """
def fall_back(model):
    accelerator = Accelerator()
    loader = DataLoader(TensorDataset(x), batch_size=32)
    model, loader = accelerator.prepare(model, loader)
    for (inputs,) in loader:
        with torch.no_grad():
            torch.linalg.eigvals(model(inputs)[:4, :4])
notebook_launcher(fall_back, (nn.Linear(8, 4),), 1, dashboard="text")
""",
    )
    assert "eig" in cell.stdout
    assert "runs on the CPU, because the device does not support it" in cell.stdout


def test_compiling_is_shown(stepping: Kernel) -> None:
    """The board shows it during the first steps, and training again after them."""
    cell = stepping.run(
        """
from nblaunch import context
def states(model):
    accelerator = Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(x), batch_size=24)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    for (inputs,) in loader:
        seen.append(context.current().slot.state.name)
        accelerator.backward(model(inputs).sum())
        optimizer.step()
    return seen
notebook_launcher(states, (nn.Linear(8, 4),), 1)
""",
    )
    assert cell.value == ["COMPILING", "COMPILING", "TRAINING", "TRAINING"]


def test_graphs_are_kept_in_a_folder_that_workers_share(stepping: Kernel) -> None:
    """The test only writes: on the CPU, torch_xla 2.9 can't read executables back."""
    cell = stepping.run(
        """
import tempfile
folder = tempfile.mkdtemp()
os.environ["NBLAUNCH_XLA_CACHE"] = folder + "/graphs"
try:
    notebook_launcher(lambda m: train(m, 2), (nn.Linear(8, 4),), 2)
finally:
    del os.environ["NBLAUNCH_XLA_CACHE"]
len(os.listdir(folder + "/graphs"))
""",
    )
    assert cell.value >= 2
