"""Two notebooks as two nodes: each kernel stays usable before, during and after the job."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels import Kernel

CELL = """
import torch
from torch import nn
from nblaunch import Accelerator, notebook_launcher

torch.manual_seed(0)
model = nn.Linear(4, 2)

def train(model, steps):
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in accelerator.progress(range(steps)):
        loss = model(torch.ones(2, 4) * (1 + accelerator.process_index)).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            print("under way", flush=True)
    return accelerator.process_index, next(model.parameters()).sum().item()

def launch(steps):
    return notebook_launcher(train, (model, steps), num_processes=1, num_nodes=2, node_rank={rank}, use_port={port},
                             backend="cpu", rdzv_timeout_s=200, rdzv_conf={{"keep_alive_interval": 2}})
"""


@pytest.fixture
def kernels(nothing_left_behind: None, tmp_path: Path) -> Iterator[list[Kernel]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    logs = [{"NBLAUNCH_LOG_DIR": str(tmp_path / name)} for name in ("0", "1")]
    with Kernel.start(env=logs[0]) as one, Kernel.start(env=logs[1]) as other:
        for rank, kernel in enumerate((one, other)):
            kernel.run(CELL.format(rank=rank, port=port))
        yield [one, other]


def test_two_notebooks_form_one_job(kernels: list[Kernel]) -> None:
    cells = [kernel.submit("launch(1_000_000)") for kernel in kernels]
    for cell in cells:
        cell.wait_for_text("under way")
    kernels[1].interrupt()
    errors = [cell.wait().error for cell in cells]
    assert [error.name for error in errors if error is not None] == ["NodeLost", "KeyboardInterrupt"]
    assert errors[0] is not None
    assert re.search(r"node 1 \(host \S+, rank 1\) was interrupted", errors[0].text)
    for kernel in kernels:
        kernel.wait_for_no_processes()

    cells = [kernel.submit("value = launch(50)") for kernel in kernels]
    for cell in cells:
        assert cell.wait().error is None, cell.describe()
        table = next(display.data["text/plain"] for display in cell.displays if "text/plain" in display.data)
        assert "done" in table
        assert "steps: 50\n" in table
        assert "ranks 0 and 1 alike" in table, "of both machines"
    look = "print(value[0], value[1] == next(model.parameters()).sum().item(), value[1])"
    seen = [kernel.run(look).stdout.split() for kernel in kernels]
    assert [words[:2] for words in seen] == [["0", "True"], ["1", "True"]]
    assert seen[0][2] == seen[1][2]
    for kernel in kernels:
        kernel.wait_for_no_processes()
