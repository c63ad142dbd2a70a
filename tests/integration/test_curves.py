"""The loss curve of a run: the same in every run and every display, and as long as the training."""

from __future__ import annotations

import re

import pytest

from tests.kernels import Kernel

STEPS, EPOCHS = 11, 12

TRAIN = f"""
import torch
from torch.utils.data import DataLoader, TensorDataset
from nblaunch import Accelerator, notebook_launcher

def train():
    torch.manual_seed(0)
    accelerator = Accelerator()
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(torch.randn({STEPS} * 8, 3)), batch_size=8)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for epoch in range({EPOCHS}):
        for (x,) in loader:
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.timeout(180)
def test_two_runs_have_the_same_curve_in_every_display(kernel: Kernel) -> None:
    kernel.run(TRAIN)
    charts = []
    for dashboard in ("html", "widgets", "html"):
        cell = kernel.run(f"notebook_launcher(train, (), 1, dashboard={dashboard!r}, backend='cpu')")
        html = cell.displays[0].data["text/html"]
        charts.append(re.search(r'<svg [^>]*aria-label="loss: .*?</svg>', html)[0])  # type: ignore[index]
    assert f" in {EPOCHS * STEPS} steps" in charts[0]
    assert charts[0] == charts[1] == charts[2]
