"""Errors without an exception in ranks of different nodes: compared over all nodes, and reported once."""

from __future__ import annotations

import pytest

from tests.kernels import Kernel
from tests.thorough import thorough

TRAINING = """
def train(is_prepared, path):
    torch.manual_seed(0)
    accelerator = Accelerator()
    plain = nn.Linear(4, 1)
    rows = torch.utils.data.TensorDataset(torch.randn(192, 4))
    parts = plain, torch.optim.SGD(plain.parameters(), 0.01), torch.utils.data.DataLoader(rows, 8)
    model, optimizer, loader = accelerator.prepare(*parts)
    for (batch,) in loader:
        accelerator.backward((model if is_prepared else plain)(batch).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
    torch.save([1], path)
"""


@pytest.mark.parametrize("per_node", [thorough(1), 2])
def test_ranks_are_compared_across_nodes(kept: Kernel, per_node: int, tmp_path: object) -> None:
    kept.run(TRAINING)
    ranks = 2 * per_node
    settings = f"num_processes={ranks}"
    shown = " ".join(kept.submit(f"launch(train, False, '{tmp_path}/w.pt', {settings})").wait().shown.split())
    assert shown.count("NBLAUNCH_CHECKS=-replicas_differ silences") == 2, "a line, and the summary"
    # A path may name different files on two machines, so each node compares only its own ranks.
    assert ("NBLAUNCH_CHECKS=-same_file silences" in shown) == (per_node == 2)
    assert f"(ranks 0-{ranks - 1}, " in shown
