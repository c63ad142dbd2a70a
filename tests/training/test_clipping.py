"""Clipping on several ranks: returned norms and clipped gradients equal those of one process in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from nblaunch import Accelerator, AutocastKwargs, FullyShardedDataParallelPlugin, GradScalerKwargs, context
from nblaunch.training.collectives import dtensor
from nblaunch.training.parallelism import ParallelismConfig
from tests.thorough import thorough
from tests.training import ranks

NUM_ROWS = 20
GLOBAL_BATCH = 4  # five batches: with windows of two, the last one is short
CLIPPINGS: dict[str, tuple[float, float]] = {"2": (0.05, 2.0), "1": (0.05, 1.0), "inf": (0.05, float("inf"))}
MAX_VALUE = 0.01


def _network(dtype: torch.dtype) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        # No multiple of the ranks, and a last layer of which a rank has nothing.
        return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 1)).to(dtype)


def _rows(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(NUM_ROWS, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return inputs.to(dtype), inputs.sum(dim=1, keepdim=True).sin().to(dtype)


Found = list[tuple[float, list[torch.Tensor]]]
"""For each optimizer step the norm, or 0.0, and the clipped gradients."""


def _expected(clipping: str, num_steps: int) -> Found:
    model, found = _network(torch.float64), []
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = list(zip(*(column.split(GLOBAL_BATCH) for column in _rows(torch.float64)), strict=True))
    for number, (inputs, targets) in enumerate(batches, 1):
        ((model(inputs) - targets).square().mean() / num_steps).backward()
        if number % num_steps == 0 or number == len(batches):
            norm = 0.0
            if clipping == "value":
                nn.utils.clip_grad_value_(model.parameters(), MAX_VALUE)
            else:
                norm = float(nn.utils.clip_grad_norm_(model.parameters(), *CLIPPINGS[clipping]))
            found.append((norm, [_copy(parameter.grad) for parameter in model.parameters()]))
            sgd.step()
            sgd.zero_grad()
    return found


def _copy(gradient: Any) -> torch.Tensor:
    whole: torch.Tensor = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return whole.detach().double().clone()


def _train(strategy: str, precision: str, clipping: str, num_steps: int) -> Found:
    dtype = torch.float64 if precision == "no" else torch.float32
    # nblaunch computes in full precision instead of fp16 on a CPU. Autocast stays off, but losses are scaled.
    type(context.current().backend).precision_problem = lambda self, precision: None  # type: ignore[method-assign]
    scaling = [AutocastKwargs(enabled=False), GradScalerKwargs(init_scale=256.0)]
    accelerator = Accelerator(
        split_batches=True,
        mixed_precision=precision,
        gradient_accumulation_steps=num_steps,
        kwargs_handlers=scaling if precision == "fp16" else [],
        fsdp_plugin=FullyShardedDataParallelPlugin() if strategy == "fsdp" else None,
        parallelism_config=ParallelismConfig(tp_size=2) if strategy == "tp" else None,
    )
    model: Any = _network(dtype)
    if strategy == "tp":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, accelerator.torch_device_mesh["tp"], plan)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(
        model, sgd, DataLoader(TensorDataset(*_rows(dtype)), batch_size=GLOBAL_BATCH)
    )
    found = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward((model(inputs) - targets).square().mean())
            if accelerator.sync_gradients:
                norm = 0.0
                if clipping == "value":
                    accelerator.clip_grad_value_(model.parameters(), MAX_VALUE)
                else:
                    norm = accelerator.clip_grad_norm_(model.parameters(), *CLIPPINGS[clipping]).item()
                found.append((norm, [_copy(parameter.grad) for parameter in model.parameters()]))
            optimizer.step()
            optimizer.zero_grad()
    return found


@pytest.mark.parametrize("num_steps", [thorough(1), 2])
@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "tp"])
def test_norms_and_clipped_gradients_are_those_of_one_process(
    strategy: str, precision: str, num_steps: int
) -> None:
    tolerance = {"no": 1e-9, "fp16": 5e-3, "bf16": 0.05}[precision]
    for clipping in ("2", "value") if precision != "no" else (*CLIPPINGS, "value"):
        expected = _expected(clipping, num_steps)
        for found in ranks.run(_train, 2, strategy, precision, clipping, num_steps):
            assert [norm for norm, _ in found] == pytest.approx([norm for norm, _ in expected], rel=tolerance)
            for (_, gradients), (_, wanted) in zip(found, expected, strict=True):
                largest = max(float(one.abs().max()) for one in wanted)
                torch.testing.assert_close(gradients, wanted, rtol=tolerance, atol=3 * tolerance * largest)


def _norm_of_one_row(dtype: torch.dtype) -> float:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
    model = accelerator.prepare(nn.Linear(3, 1, dtype=dtype))
    accelerator.backward(300 * model(torch.ones(1, 3, dtype=dtype)).sum())
    return float(accelerator.clip_grad_norm_(model.parameters(), 1.0))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_ranks_without_elements_take_part(dtype: torch.dtype) -> None:
    # The square of the norm, 600, exceeds the range of 16 bits.
    assert ranks.run(_norm_of_one_row, 2, dtype) == [600.0, 600.0]


def _clipped_sum() -> list[float]:
    accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
    mesh = accelerator.torch_device_mesh["tp"]
    parameter = nn.Parameter(distribute_tensor(torch.zeros(2), mesh, [Replicate()]))
    summand = torch.tensor([3.0, 0.5]) * (1 if accelerator.process_index else -1) + torch.tensor([0.0, 0.75])
    parameter.grad = DTensor.from_local(summand, mesh, [Partial()])
    accelerator.clip_grad_value_([parameter], 1.0)
    return dtensor.local(parameter.grad).tolist()


def test_values_of_a_gradient_are_clipped_after_its_summands_are_added() -> None:
    assert ranks.run(_clipped_sum, 2) == [[0.0, 1.0]] * 2
