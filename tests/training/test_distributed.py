"""The Accelerator on real ranks: training equals that of one process, collectives, metrics exact to the sample."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nblaunch import Accelerator
from nblaunch.training.options import DataLoaderConfiguration
from tests.training import ranks


def _dataset(num_rows: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(num_rows, 6, generator=generator)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True).sin(), torch.arange(num_rows))


def _network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def _train(batch_size: int, split: bool, accumulation: int, rows: int) -> dict[str, torch.Tensor]:
    accelerator = Accelerator(split_batches=split, gradient_accumulation_steps=accumulation)
    model = _network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = DataLoader(
        _dataset(rows), batch_size=batch_size, shuffle=True, generator=torch.Generator().manual_seed(5)
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.5)
    wrapped, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for _ in range(3):
        for inputs, targets, _index in loader:
            with accelerator.accumulate(wrapped):
                accelerator.backward((wrapped(inputs) - targets).pow(2).mean())
                accelerator.clip_grad_norm_(wrapped.parameters(), 1.0) if accelerator.sync_gradients else None
                optimizer.step()
                if split:
                    scheduler.step()
                optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_training_equals_that_of_one_process(world_size: int, split: bool, accumulation: int) -> None:
    # The same global batches everywhere: 16 rows, all of them full.
    batch_size = 16 if split else 16 // world_size
    expected = ranks.run(_train, 1, 16, split, accumulation, 64)[0]
    weights = ranks.run(_train, world_size, batch_size, split, accumulation, 64)
    for rank in range(world_size):
        torch.testing.assert_close(weights[rank], expected, rtol=1e-4, atol=1e-6)


def _seen_in_metrics(rows: int, batch_size: int, shuffle: bool, options: dict[str, Any]) -> list[list[int]]:
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options))
    loader = accelerator.prepare(DataLoader(_dataset(rows), batch_size=batch_size, shuffle=shuffle))
    epochs = []
    for _ in range(2):
        seen: list[int] = []
        for _inputs, _targets, index in loader:
            seen += accelerator.gather_for_metrics({"index": index})["index"].tolist()
        epochs.append(seen)
    return epochs


@pytest.mark.parametrize("rows", [1, 7, 12, 13, 24])
@pytest.mark.parametrize("options", [{}, {"split_batches": True}, {"use_seedable_sampler": True}])
def test_metrics_count_every_sample_once(rows: int, options: dict[str, Any]) -> None:
    for epochs in ranks.run(_seen_in_metrics, 2, rows, 4, True, options):
        for seen in epochs:
            assert sorted(seen) == list(range(rows))


def test_metrics_keep_the_order_of_the_dataset() -> None:
    for epochs in ranks.run(_seen_in_metrics, 2, 13, 4, False, {}):
        assert epochs == [list(range(13))] * 2
