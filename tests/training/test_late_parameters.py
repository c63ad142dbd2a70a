"""Parameters that are unfrozen, added, replaced or frozen after ``prepare``, compared with one process in double
precision.
"""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from nblaunch import Accelerator
from nblaunch.training.options import DistributedDataParallelKwargs
from tests.training import ranks


def _rows() -> torch.Tensor:
    return torch.randn(16, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def _layer(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(3, 3).double()


def _change(kind: str, model: nn.Sequential, optimizer: Any, rank: int) -> None:
    if kind == "unfrozen":
        model[0].requires_grad_(True)
    elif kind == "added":
        model.append(_layer(7 + rank))  # ranks may draw different weights; rank 0's count
        optimizer.add_param_group({"params": list(model[-1].parameters())})
    elif kind == "replaced":
        model[1].weight = nn.Parameter(_layer(7 + rank).weight.detach())
        optimizer.param_groups[0]["params"][:] = [p for p in model.parameters() if p.requires_grad]


def _train(kind: str, num_steps: int, options: dict[str, Any], is_pickled: bool = False) -> list[float]:
    handlers = [DistributedDataParallelKwargs(**options)]
    accelerator = Accelerator(
        split_batches=True, gradient_accumulation_steps=num_steps, kwargs_handlers=handlers
    )
    model = nn.Sequential(_layer(1), _layer(2))
    if kind == "unfrozen":
        model[0].requires_grad_(False)
    wrapped = accelerator.prepare(model)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    if is_pickled:
        accelerator, model, wrapped, optimizer = pickle.loads(
            pickle.dumps((accelerator, model, wrapped, optimizer))
        )
    for number, rows in enumerate(accelerator.prepare(DataLoader(_rows(), batch_size=2))):
        if number == 4:
            _change(kind, model, optimizer, accelerator.process_index)
        with accelerator.accumulate(wrapped):
            accelerator.backward(wrapped(rows).pow(2).mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


@pytest.mark.parametrize("num_steps", [1, 2])
@pytest.mark.parametrize("kind", ["unfrozen", "added", "replaced"])
def test_gradients_of_parameters_that_change_after_prepare_are_averaged(kind: str, num_steps: int) -> None:
    options = {"find_unused_parameters": True} if kind == "replaced" else {}
    (expected,) = ranks.run(_train, 1, kind, num_steps, {})
    for weights in ranks.run(_train, 2, kind, num_steps, options):
        assert weights == pytest.approx(expected, rel=1e-9)


def test_unpickled_models_average_late_parameters() -> None:
    (expected,) = ranks.run(_train, 1, "unfrozen", 2, {})
    for weights in ranks.run(_train, 2, "unfrozen", 2, {}, True):
        assert weights == pytest.approx(expected, rel=1e-9)


def _freeze(is_whole: bool, options: dict[str, Any], change: str = "freeze") -> str:
    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**options)])
    model = nn.Sequential(_layer(1), _layer(2))
    wrapped = accelerator.prepare(model)
    rows = _rows().requires_grad_()
    if change != "freeze":
        accelerator.backward(wrapped(rows).sum())
        if change == "replace":
            model[0] = _layer(7)
        else:
            del model[0]
        with accelerator.no_sync(wrapped):
            accelerator.backward(wrapped(rows).sum())  # nothing to average yet
    else:
        (model if is_whole else model[0]).requires_grad_(False)
    try:
        for _ in range(2):
            accelerator.backward(wrapped(rows).sum())
    except RuntimeError as error:
        return str(error)
    return ""


def test_parameters_frozen_after_prepare_are_named() -> None:
    for message in ranks.run(_freeze, 2, False, {}):
        assert message.startswith(
            "0.weight, 0.bias of the Sequential was frozen after prepare, but Distributed"
        )
        assert "find_unused_parameters=True" in message
    assert ranks.run(_freeze, 2, False, {"find_unused_parameters": True}) == ["", ""]
    assert ranks.run(_freeze, 2, True, {}) == ["", ""]
    assert ranks.run(_freeze, 2, False, {"static_graph": True}) == ["", ""], "the graph is not known yet"


@pytest.mark.parametrize("change", ["replace", "delete"])
def test_layers_lost_after_prepare_are_named_before_torch_skips_an_average(change: str) -> None:
    for options in ({}, {"static_graph": True}):
        for message in ranks.run(_freeze, 2, False, options, change):
            assert message.startswith(
                "0.weight, 0.bias of the Sequential was removed or replaced after prepare, but"
            )
            assert "find_unused_parameters=True" in message
    assert ranks.run(_freeze, 2, False, {"find_unused_parameters": True}, change) == ["", ""]


def _join_late() -> str:
    accelerator = Accelerator()
    model = nn.Sequential(_layer(1), _layer(2))
    model[0].requires_grad_(False)
    wrapped = accelerator.prepare(model)
    model[0].requires_grad_(True)
    try:
        with accelerator.join_uneven_inputs([wrapped]):
            accelerator.backward(wrapped(_rows()).sum())
    except RuntimeError as error:
        return str(error)
    return ""


def test_joining_rejects_late_parameters() -> None:
    for message in ranks.run(_join_late, 2):
        assert message.startswith(
            "2 parameters were unfrozen or added after prepare. In join_uneven_inputs, ranks"
        )
