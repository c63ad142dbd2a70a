"""Sharded training on real GPUs: two ranks over NCCL, or on one GPU over gloo. Skipped without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from nblaunch import Accelerator, FullyShardedDataParallelPlugin
from nblaunch.backends.gpu import CUDA
from nblaunch.training.collectives import dtensor
from tests.training import ranks
from tests.training.ranks import rank_server  # noqa: F401  a fixture
from tests.training.strategies.test_fsdp2 import Network, epoch, prepared

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(CUDA.affinity() == 0, reason="no CUDA GPU here"),
]


def _train(settings: dict[str, Any] | None, precision: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(3)
    accelerator, *rest = prepared(settings, Network(), mixed_precision=precision)
    results = [*epoch(accelerator, *rest), *epoch(accelerator, *rest)]
    weights = accelerator.get_state_dict(rest[0])
    assert accelerator.num_processes == 1 or {weight.device.type for weight in weights.values()} == {"cpu"}
    # Otherwise the test process would start CUDA to receive them.
    return results, {name: weight.cpu() for name, weight in weights.items()}


def test_one_rank_trains_as_without_shards() -> None:
    ((expected, _),) = ranks.run(_train, 1, None, "no", backend="cuda")
    ((found, _),) = ranks.run(_train, 1, {}, "no", backend="cuda")
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "precision"),
    [({}, "no"), ({"cpu_offload": True}, "no"), ({"activation_checkpointing": True}, "no"), ({}, "bf16")],
    ids=["plain", "offload", "checkpointing", "bf16"],
)
def test_training_matches_one_process(settings: dict[str, Any], precision: str) -> None:
    (expected,) = ranks.run(_train, 1, None, precision, backend="cuda")
    found = ranks.run(_train, 2, settings, precision, backend="cuda", timeout_s=100)
    tolerance = 1e-3 if precision == "no" else 0.05
    for results, _ in found:
        assert results == pytest.approx(expected[0], rel=tolerance, abs=tolerance)


def _train_in_fp16() -> tuple[list[bool], float]:
    accelerator, model, optimizer, loader = prepared({}, Network(), mixed_precision="fp16")
    skipped = []
    for inputs, targets in loader:
        loss = (model(inputs) - targets).pow(2).mean()
        # Only one rank overflows at the first step, and all ranks must skip it.
        is_culprit = not skipped and accelerator.is_main_process
        accelerator.backward(loss * (1e30 if is_culprit else 1.0))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        skipped.append(accelerator.optimizer_step_was_skipped)
    total = sum(dtensor.local(parameter).float().abs().sum().item() for parameter in model.parameters())
    return skipped, total


def test_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    (first, total), (second, _) = ranks.run(_train_in_fp16, 2, backend="cuda")
    assert first == second
    assert first[0]
    assert not first[-1]
    assert total == total


def _allocated() -> tuple[float, float]:
    """Return the GPU memory after sharding and its peak during sharding, in units of the model's size."""
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(8)])
    model_bytes = sum(parameter.numel() * 4 for parameter in model.parameters())
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    accelerator.prepare(model)
    return (
        (torch.cuda.memory_allocated() - before) / model_bytes,
        (torch.cuda.max_memory_allocated() - before) / model_bytes,
    )


def test_no_gpu_holds_the_whole_model() -> None:
    for held, peak in ranks.run(_allocated, 2, backend="cuda"):
        assert 0.49 < held < 0.55
        assert peak < 0.7  # one layer at a time, if ranks built different weights and rank 0 sends its own


def _save_and_load(folder: str) -> bool:
    accelerator, *rest = prepared({}, Network())
    epoch(accelerator, *rest)
    accelerator.save_state(folder)
    expected = epoch(accelerator, *rest)
    accelerator.load_state(folder)
    again = epoch(accelerator, *rest)
    return expected == pytest.approx(again, rel=1e-3)


def test_checkpoints_in_parts(tmp_path: Path) -> None:
    assert ranks.run(_save_and_load, 2, str(tmp_path / "state"), backend="cuda") == [True, True]
