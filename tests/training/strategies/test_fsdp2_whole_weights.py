"""Weights that fully_shard rejects: without dimensions, or with another dtype than their unit; averages, optimizers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from nblaunch import Accelerator, FullyShardedDataParallelPlugin
from nblaunch.training.collectives import dtensor
from nblaunch.weights import is_sharded
from tests.training import ranks

NUM_ROWS, STEPS, ACCUMULATED = 8, 3, 2


class Scaled(nn.Module):
    """A layer with scalar parameters, like CLIP's ``logit_scale``, in other dtypes than its weights."""

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4).to(low)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 4, dtype=torch.float64))
        self.shift = nn.Parameter(torch.full((3,), 0.5, dtype=low))
        self.logit_scale = nn.Parameter(torch.tensor(0.25, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.tensor(2.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.layer(x.to(self.layer.weight.dtype)).double() * self.scale * self.logit_scale.exp()
        return torch.tanh(rows + self.shift.double().sum()) * self.frozen


class Inner(nn.Module):
    """Nested modules with weights of one dtype, another dtype, and the first dtype again."""

    def __init__(self, low: torch.dtype) -> None:
        super().__init__()
        self.outer = nn.Sequential(nn.Linear(4, 4).to(low), nn.Sequential(nn.LayerNorm(4).double()))
        self.gain = nn.Parameter(torch.ones(4, dtype=low))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.outer[0](x.to(self.gain.dtype)) * self.gain
        return self.outer[1](rows.double())


def _network(low: torch.dtype) -> nn.Module:
    torch.manual_seed(5)
    blocks = nn.ModuleList([Scaled(low), Scaled(low)])
    return nn.Sequential(*blocks, Inner(low), nn.Linear(4, 2).double())


def _train(low: torch.dtype, settings: dict[str, Any] | None, folder: str) -> dict[str, Any]:
    """Train on this rank's rows of each batch, save in the middle, and return the weights after resuming from there."""
    plugin = None if settings is None else FullyShardedDataParallelPlugin(**settings)
    accelerator = Accelerator(fsdp_plugin=plugin, gradient_accumulation_steps=ACCUMULATED)
    module = _network(low)
    model, optimizer = accelerator.prepare(
        module, torch.optim.AdamW(module.parameters(), lr=0.02, foreach=None)
    )
    torch.manual_seed(11)
    batches = torch.randn(ACCUMULATED * STEPS, NUM_ROWS, 4, dtype=torch.float64)
    rows = slice(accelerator.process_index, None, accelerator.num_processes)
    for number, batch in enumerate(batches):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch[rows]).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
        if number + 1 == ACCUMULATED:
            accelerator.save_state(folder)
            with torch.no_grad():
                for parameter in module.parameters():
                    dtensor.local(parameter).zero_()
            accelerator.load_state(folder)
    if accelerator.num_processes > 1:
        whole = {name for name, one in module.named_parameters() if not is_sharded(one)}
        expected = {f"{block}.{name}" for block in (0, 1) for name in ("logit_scale", "frozen")}
        assert whole - {"0.scale", "1.scale", "0.shift", "1.shift"} == expected
    full = dtensor.gather(module.state_dict(), True)
    return {name: value.double() for name, value in full.items()}


@pytest.mark.parametrize("low", [torch.float64, torch.float32])
def test_weights_that_cannot_be_sharded_are_trained_alike(tmp_path: Path, low: torch.dtype) -> None:
    (expected,) = ranks.run(_train, 1, low, None, str(tmp_path / "alone"))
    settings = {"transformer_cls_names_to_wrap": ["Scaled", "Inner"]}
    precision = 1e-9 if low == torch.float64 else 1e-4
    for weights in ranks.run(_train, 2, low, settings, str(tmp_path / "sharded")):
        assert weights.keys() == expected.keys()
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], rtol=precision, atol=precision, msg=name)


def _train_in_bf16() -> list[torch.dtype]:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(), mixed_precision="bf16")
    module = Scaled(torch.float32).to(torch.bfloat16)
    accelerator.prepare(module)
    return [module.logit_scale.dtype, module.layer.weight.dtype]


def test_scalars_are_trained_in_fp32_beside_shards() -> None:
    assert ranks.run(_train_in_bf16, 2) == [[torch.float32] * 2] * 2


def _averaged() -> tuple[list[float], ...]:
    def network() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()

    inputs = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)
    alone, accelerator = network(), Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    expected, own = AveragedModel(alone), torch.optim.SGD(alone.parameters(), lr=0.1)
    module = network()
    model, average, optimizer = accelerator.prepare(
        module, AveragedModel(module), torch.optim.SGD(module.parameters(), lr=0.1)
    )
    for _ in range(3):
        for trained, stepped, one, backward in (
            (alone, own, expected, torch.Tensor.backward),
            (model, optimizer, average, accelerator.backward),
        ):
            stepped.zero_grad()
            backward(trained(inputs).square().sum())
            stepped.step()
            one.update_parameters(trained)
    with pytest.raises(RuntimeError, match=r"can't be copied by copy\.deepcopy"):
        copy.deepcopy(model)
    return expected(inputs).flatten().tolist(), average(inputs).flatten().tolist()


def test_an_averaged_model_is_made_before_the_model_is_prepared() -> None:
    for expected, averaged in ranks.run(_averaged, 2):
        assert averaged == pytest.approx(expected, rel=1e-12)


def _rejected_optimizers() -> list[str]:
    from transformers.optimization import Adafactor

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    messages = []
    for kind in (torch.optim.Adafactor, torch.optim.LBFGS, torch.optim.Rprop, Adafactor):
        module = nn.Linear(4, 4)
        with pytest.raises(ValueError, match="which torch can't do") as caught:
            accelerator.prepare(module, kind(module.parameters()))
        messages.append(str(caught.value).partition(" ")[0])
    return messages


def test_optimizers_without_shard_support_are_rejected() -> None:
    assert ranks.run(_rejected_optimizers, 2)[0] == ["Adafactor", "LBFGS", "Rprop", "Adafactor"]
