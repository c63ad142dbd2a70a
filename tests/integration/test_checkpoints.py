"""Checkpoints of launched workers: the next launch continues from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels import Kernel

TRAIN = """
from nblaunch import Accelerator
def train(folder, asynchronous, steps):
    project = nblaunch.ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=1)
    accelerator = Accelerator(project_config=project)
    nblaunch.set_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
    if os.path.isdir(folder + "/checkpoints"):
        accelerator.load_state()
    for step in range(steps):
        accelerator.backward(model(torch.rand(3, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.save_state(asynchronous=asynchronous)
    return accelerator.unwrap_model(model)[0].weight.tolist()
"""


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_launch_resumes_another_launchs_checkpoint(
    shared: Kernel, tmp_path: Path, asynchronous: bool
) -> None:
    cell = shared.run(
        f"""{TRAIN}
whole = notebook_launcher(train, ({str(tmp_path / "whole")!r}, {asynchronous}, 4), num_processes=2)
parts = [notebook_launcher(train, ({str(tmp_path / "parts")!r}, {asynchronous}, 2), num_processes=2) for _ in range(2)]
whole == parts[1], whole == parts[0], os.listdir({str(tmp_path / "parts" / "checkpoints")!r})
"""
    )
    # Only the end of the worker waits for the last checkpoint.
    assert cell.value == (True, False, ["checkpoint_3"])
