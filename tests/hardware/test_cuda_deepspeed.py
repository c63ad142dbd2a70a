"""DeepSpeed's engine on real GPUs. Skipped without one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nblaunch import Accelerator, DeepSpeedPlugin
from nblaunch.backends.gpu import CUDA
from nblaunch.utils import DummyOptim
from tests.kernels import Kernel
from tests.training import ranks
from tests.training.ranks import rank_server  # noqa: F401  a fixture

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(CUDA.affinity() == 0, reason="no CUDA GPU here"),
    pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"),
    pytest.mark.timeout(300),
]

TIMEOUT_S = 240.0  # DeepSpeed may compile an optimizer the first time


def _train(
    plugin: DeepSpeedPlugin | None, precision: str = "no", is_described: bool = False
) -> dict[str, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(deepspeed_plugin=plugin, mixed_precision=precision)
    module = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    kind = DummyOptim if is_described else torch.optim.AdamW
    inputs = torch.randn(128, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    loader = DataLoader(data, batch_size=16 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(module, kind(module.parameters(), lr=0.01), loader)
    losses, skipped = [], 0
    for _ in range(6):
        for x, y in loader:
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            optimizer.zero_grad()
            skipped += accelerator.optimizer_step_was_skipped
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return {
        "losses": losses,
        "skipped": skipped,
        "device": next(iter(model.buffers()), x).device.type,
        # On the CPU, because the test process would otherwise start CUDA to receive them.
        "weights": {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()},
    }


def _zero(stage: int, **more: Any) -> DeepSpeedPlugin:
    return DeepSpeedPlugin(
        {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}, **more}
    )


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_training_matches_one_process(stage: int, world_size: int) -> None:
    if world_size > CUDA.device_count():
        pytest.skip("DeepSpeed's ranks talk by NCCL, which joins two GPUs or more")
    (alone,) = ranks.run(_train, 1, None, backend="cuda", timeout_s=TIMEOUT_S)
    results = ranks.run(_train, world_size, _zero(stage), backend="cuda", timeout_s=TIMEOUT_S)[0]
    assert results["device"] == "cuda"
    assert results["losses"] == pytest.approx(alone["losses"], rel=1e-3, abs=1e-3)
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(results["weights"][name], weight, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bits(precision: str, stage: int) -> None:
    reason = CUDA.precision_problem(precision)
    if reason is not None:
        pytest.skip(reason)
    # A scale that overflows at first: the engine skips steps until it fits.
    scaled = {"fp16": {"enabled": "auto", "initial_scale_power": 32}}
    results = ranks.run(_train, 1, _zero(stage, **scaled), precision, backend="cuda", timeout_s=TIMEOUT_S)[0]
    assert (results["skipped"] > 0) == (precision == "fp16")
    assert results["losses"][-1] < results["losses"][0] / 2


def test_offloading_and_an_optimizer_of_the_configuration() -> None:
    described = {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
    }
    results = ranks.run(
        _train, 1, DeepSpeedPlugin(described), "no", True, backend="cuda", timeout_s=TIMEOUT_S
    )[0]
    assert results["losses"][-1] < results["losses"][0] / 2


def test_weights_come_back_to_a_notebook_on_the_cpu(kernel: Kernel, tmp_path: Path) -> None:
    cell = kernel.run(
        """
import torch
from torch import nn
from nblaunch import Accelerator, DeepSpeedPlugin, notebook_launcher
model = nn.Linear(6, 3)
def train(model):
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3), mixed_precision="bf16")
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(prepared(torch.ones(2, 6, device=accelerator.device)).sum())
    optimizer.step()
    return accelerator.get_state_dict(prepared)
whole = notebook_launcher(train, (model,), 1, backend="cuda")
all(torch.equal(value.bfloat16(), whole[name]) for name, value in model.state_dict().items()), model.weight.device.type
""",
        timeout_s=TIMEOUT_S,
    )
    assert cell.result == "(True, 'cpu')"


def _choose() -> None:
    Accelerator(deepspeed_plugin=DeepSpeedPlugin())


@pytest.mark.skipif(CUDA.device_count() > 1, reason="two GPUs are there for two ranks")
def test_ranks_that_share_a_gpu_are_rejected() -> None:
    with pytest.raises(ranks.RankFailed, match="gloo, because they share GPUs"):
        ranks.run(_choose, 2, backend="cuda")
