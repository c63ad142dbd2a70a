"""Checks of training loops in a process without a launcher. tests/integration tests them on ranks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn
from torch.utils.data import DataLoader, TensorDataset

from nblaunch import Accelerator, env
from tests.training import ranks

ROOT = Path(__file__).parents[2]


def _train(num_steps: int, after_step: Callable[[Accelerator, nn.Module], object]) -> None:
    accelerator = Accelerator()
    layer = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), 0.1))
    for _ in range(num_steps):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        after_step(accelerator, model)
        optimizer.zero_grad()


def _clip(accelerator: Accelerator, model: nn.Module) -> None:
    accelerator.clip_grad_norm_(model.parameters(), 1.0)


@pytest.mark.usefixtures("unwatched")
def test_a_script_without_a_launcher_is_warned_once_at_its_line() -> None:
    with pytest.warns(UserWarning, match="NBLAUNCH_CHECKS=-clipping_after_step") as caught:
        _train(20, _clip)
    assert [one.filename for one in caught] == [__file__]


@pytest.mark.usefixtures("unwatched")
def test_warnings_can_be_errors() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="clipping_after_step"):
            _train(20, _clip)


@pytest.mark.alarms("clipping_after_step")
def test_observations_without_a_launcher_are_alarms_of_a_test() -> None:
    _train(20, _clip)


def _loader(accelerator: Accelerator) -> Any:
    data = TensorDataset(torch.randn(48, 2), torch.randn(48, 1))
    return accelerator.prepare(DataLoader(data, 4, shuffle=True))


def test_statistics_of_the_data_or_of_an_average_are_no_evaluation() -> None:
    accelerator = Accelerator()
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    loader = _loader(accelerator)
    for inputs, _ in loader:
        accelerator.backward(model(inputs).sum())
        optimizer.step()
        optimizer.zero_grad()
    update_bn(loader, AveragedModel(model))
    with torch.no_grad():
        assert sum(inputs.sum() for inputs, _ in loader).isfinite()
    model[1].momentum = None  # the model's own statistics, computed anew
    with torch.no_grad():
        for inputs, _ in loader:
            model(inputs)


def test_gradients_of_interest_before_the_first_step_are_no_missing_steps() -> None:
    accelerator = Accelerator()
    layer = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), 0.1))
    squares = torch.zeros_like(layer.weight)
    for inputs, _ in _loader(accelerator):
        accelerator.backward(model(inputs).sum())
        squares += layer.weight.grad**2
        optimizer.zero_grad()
    accelerator.backward((layer.weight**2 * squares).sum())
    optimizer.step()


@pytest.mark.parametrize("is_frozen", [False, True])
def test_layers_may_be_frozen_beside_others_that_train(is_frozen: bool) -> None:
    accelerator = Accelerator()
    body, head = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)), nn.Linear(2, 1)
    body.requires_grad_(not is_frozen)
    model = accelerator.prepare(nn.Sequential(body, head).train(not is_frozen))
    trained, frozen = accelerator.prepare(
        torch.optim.SGD(head.parameters(), 0.1), torch.optim.SGD(body.parameters(), 0.1 if is_frozen else 0.0)
    )
    for inputs, _ in _loader(accelerator):
        accelerator.backward(model(inputs).sum())
        for optimizer in (trained, frozen):
            optimizer.step()
            optimizer.zero_grad()


def test_the_mean_of_as_many_losses_as_micro_steps_is_not_divided_twice() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    layer = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), 0.1))
    for number, (inputs, _) in enumerate(_loader(accelerator)):
        with accelerator.accumulate(model):
            outputs = model(inputs)
            losses = [outputs.sum(), outputs.pow(2).sum()]
            accelerator.backward((losses[0] + losses[1]) / 2 if number % 2 else sum(losses) / 2)
            optimizer.step()
            optimizer.zero_grad()


def test_a_loss_that_is_multiplied_by_the_micro_steps_is_not_divided_twice() -> None:
    """A loop that divides by the tokens of the window undoes the division of ``backward`` so."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    layer = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), 0.1))
    for inputs, _ in _loader(accelerator):
        with accelerator.accumulate(model):
            accelerator.backward(model(inputs).sum() / 7 * accelerator.gradient_accumulation_steps)
            optimizer.step()
            optimizer.zero_grad()


def _train_in_shares() -> None:
    """Train a model whose ranks step a share each, and a model of each rank, wrapped for a group of its own."""
    torch.manual_seed(0)
    accelerator = Accelerator()
    rank = accelerator.process_index
    layer = nn.Linear(2, 1, dtype=torch.complex64)
    parameters = list(layer.parameters())
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(parameters[rank : rank + 1], 0.1))
    groups = [dist.new_group([each]) for each in range(2)]
    own = nn.Linear(2, 1)
    nn.init.constant_(own.weight, rank)
    own = nn.parallel.DistributedDataParallel(own, process_group=groups[rank])
    own, for_own = accelerator.prepare(own, torch.optim.SGD(own.parameters(), 0.1))
    for _ in range(3):
        accelerator.backward(model(torch.ones(1, 2, dtype=torch.complex64)).abs().sum())
        optimizer.step()
        for place, parameter in enumerate(parameters):
            dist.broadcast(torch.view_as_real(parameter.data), place)
        model.zero_grad()
        accelerator.backward(own(torch.ones(1, 2)).sum())
        for_own.step()
        for_own.zero_grad()


def test_shares_of_the_parameters_and_models_of_a_group_are_not_compared() -> None:
    ranks.run(_train_in_shares, 2)


def calls_of_checks(num_steps: int) -> list[int]:
    """Return the number of check functions that each step calls; the first number includes the preparation."""
    calls = [0]

    def count(frame: Any, event: str, argument: Any) -> None:
        is_check = "/training/checks/" in frame.f_code.co_filename and frame.f_code.co_name != "call_watch"
        calls[-1] += event == "call" and is_check

    sys.setprofile(count)
    try:
        _train(num_steps, lambda *_: calls.append(0))
    finally:
        sys.setprofile(None)
    return calls


def test_unchecked_steps_run_no_check() -> None:
    """This runs in a fresh process, where no other test's Accelerator still watches all optimizers."""
    (calls,) = ranks.run(calls_of_checks, 1, 16)
    assert all(calls[1:10])
    assert not any(calls[11:16])


def test_an_invalid_checks_setting_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NBLAUNCH_CHECKS", "zero_learning_rate")
    with pytest.raises(ValueError, match="NBLAUNCH_CHECKS"):
        env.check()
