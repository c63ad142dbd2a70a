"""Parameters and buffers whose elements share memory, as after ``expand``: prepared, saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nblaunch import Accelerator, FullyShardedDataParallelPlugin, load_checkpoint_in_model, notebook_launcher
from tests.training import ranks
from tests.training.ranks import rank_server  # noqa: F401 (a fixture)

BASE = torch.arange(1.0, 5.0)
RATE = 0.125


def _expanded(kind: str) -> torch.Tensor:
    return {
        "expanded": BASE.expand(3, 4),
        "of one element": torch.tensor(2.0).expand(4),
        "overlapping": torch.arange(6.0).unfold(0, 3, 1),
        "transposed": torch.arange(8.0).view(2, 4).t(),
    }[kind]


class Network(nn.Module):
    """A layer and a tensor."""

    def __init__(self, kind: str, role: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)
        if role == "buffer":
            self.register_buffer("held", _expanded(kind))
            self.register_buffer("tied", self.held)
        else:
            self.held = nn.Parameter(_expanded(kind), requires_grad=role == "trained")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sum() + self.held.square().sum()


def _train_and_load(folder: str, is_sharded: bool) -> None:
    plugin = FullyShardedDataParallelPlugin() if is_sharded else None
    accelerator = Accelerator(fsdp_plugin=plugin)
    for kind in ("expanded", "of one element", "overlapping", "transposed"):
        for role in ("buffer", "frozen", "trained"):
            network, where = Network(kind, role), f"{folder}/{kind}_{role}"
            model, optimizer = accelerator.prepare(network, torch.optim.SGD(network.parameters(), lr=RATE))
            accelerator.backward(model(torch.ones(2, 4)))
            optimizer.step()
            accelerator.save_state(where)
            saved = accelerator.get_state_dict(model)
            if saved:
                factor = 1 - 2 * RATE if role == "trained" else 1.0
                assert torch.equal(saved["held"], _expanded(kind) * factor), (kind, role)
            accelerator.load_state(where)
            loaded = accelerator.get_state_dict(model)
            assert all(torch.equal(value, loaded[name]) for name, value in saved.items())
            assert role != "buffer" or network.held is network.tied
            accelerator.free_memory()


@pytest.mark.parametrize(("is_sharded", "num_ranks"), [(False, 1), (False, 2), (True, 2)])
def test_elements_that_share_memory_are_trained_saved_and_loaded(
    tmp_path: Path, is_sharded: bool, num_ranks: int
) -> None:
    ranks.run(_train_and_load, num_ranks, str(tmp_path), is_sharded)


@pytest.mark.parametrize("role", ["buffer", "frozen", "trained"])
def test_files_load_into_expanded_modules(tmp_path: Path, role: str) -> None:
    source: Any = Network("expanded", role)
    Accelerator().save_model(source, tmp_path)
    target: Any = Network("expanded", role)
    target.held = target.held.detach() if role == "buffer" else target.held
    load_checkpoint_in_model(target, tmp_path)
    assert torch.equal(target.held, source.held)


def _change(model: Network) -> None:
    accelerator = Accelerator()
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=RATE))
    accelerator.backward(prepared(torch.ones(2, 4)))
    optimizer.step()


def test_expanded_weights_come_back_to_the_kernel() -> None:
    model = Network("expanded", "trained")
    notebook_launcher(_change, (model,), num_processes=1, dashboard="none")
    assert torch.equal(model.held, _expanded("expanded") * (1 - 2 * RATE))
