"""Accumulation windows: for separately accumulated models, and with fewer micro-steps than usual."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from nblaunch import Accelerator
from nblaunch.training.options import DataLoaderConfiguration, GradientAccumulationPlugin
from nblaunch.training.strategies.deepspeed.strategy import DeepSpeedPlugin
from tests.training import ranks

ROWS, WINDOW = 14, 2


def _rows(count: int = ROWS) -> torch.Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def _model(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(3, 1).double()


def _loss(model: nn.Module, rows: torch.Tensor, sign: int) -> torch.Tensor:
    return (model(rows) - sign * rows.prod(1, keepdim=True)).pow(2).mean()


def _weights(models: Iterable[nn.Module]) -> list[float]:
    return [
        value
        for model in models
        for parameter in model.parameters()
        for value in parameter.flatten().tolist()
    ]


def _alone(
    batch: int, window: int, signs: tuple[int, ...], divides_by_actual: bool, rows: int = ROWS
) -> list[float]:
    """Train in one process in double precision, with one step per window of each model."""
    models = [_model(sign) for sign in signs]
    batches = _rows(rows).split(batch)
    for model, sign in zip(models, signs, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            for start in range(0, len(batches), window):
                part = batches[start : start + window]
                for one in part:
                    (_loss(model, one, sign) / (len(part) if divides_by_actual else window)).backward()
                optimizer.step()
                optimizer.zero_grad()
    return _weights(models)


def _train_two(kind: str) -> list[float]:
    """Train two models in the blocks of a GAN, on batches of all ranks together."""
    accelerator = Accelerator(split_batches=True, gradient_accumulation_steps=WINDOW)
    modules = [_model(1), _model(2)]
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in modules]
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0) for optimizer in optimizers]
    models = [accelerator.prepare(module) for module in modules]
    optimizers = [accelerator.prepare(optimizer) for optimizer in optimizers]
    schedules = [accelerator.prepare(schedule) for schedule in schedules]
    loader = accelerator.prepare(DataLoader(_rows(), batch_size=2))
    for _ in range(2):
        for rows in loader:
            if kind == "nested":
                with accelerator.accumulate(models[0]), accelerator.accumulate(models[1]):
                    for position in range(2):
                        accelerator.backward(_loss(models[position], rows, position + 1))
                    _step(optimizers, schedules)
            elif kind == "steps behind the blocks":
                for position in range(2):
                    with accelerator.accumulate(models[position]):
                        accelerator.backward(_loss(models[position], rows, position + 1))
                _step(optimizers, schedules)
            else:
                for position in range(2):
                    with accelerator.accumulate(models[position]):
                        accelerator.backward(_loss(models[position], rows, position + 1))
                        _step(optimizers[position : position + 1], schedules[position : position + 1])
    assert [schedule.scheduler.last_epoch for schedule in schedules] == [8, 8]  # a step per window
    return _weights(modules)


def _step(optimizers: list[Any], schedules: list[Any]) -> None:
    for optimizer, schedule in zip(optimizers, schedules, strict=True):
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("kind", ["nested", "one after the other", "steps behind the blocks"])
def test_models_can_have_separate_windows(kind: str) -> None:
    expected = _alone(2, WINDOW, (1, 2), divides_by_actual=False)
    for weights in ranks.run(_train_two, 2, kind):
        assert weights == pytest.approx(expected, rel=1e-12)


def _train_by_turns() -> list[float]:
    """Train the second model in every other batch: its windows end elsewhere, and the end of the loader closes one."""
    accelerator = Accelerator(split_batches=True, gradient_accumulation_steps=WINDOW)
    modules = [_model(1), _model(2)]
    models = [accelerator.prepare(module) for module in modules]
    optimizers = [accelerator.prepare(torch.optim.SGD(module.parameters(), lr=0.1)) for module in modules]
    for number, rows in enumerate(accelerator.prepare(DataLoader(_rows(12), batch_size=2))):
        for position in range(2):
            if position == 0 or number % 2 == 1:
                with accelerator.accumulate(models[position]):
                    accelerator.backward(_loss(models[position], rows, position + 1))
                    optimizers[position].step()
                    optimizers[position].zero_grad()
    return _weights(modules)


def test_checkpoints_within_a_window_warn(tmp_path: Path) -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    often, seldom = (accelerator.prepare(torch.nn.Linear(1, 1)) for _ in range(2))
    for number in range(1, 5):
        for model in (seldom, often) if number % 2 == 0 else (often,):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).sum())
        if number == 2:
            with pytest.warns(UserWarning, match=r"micro-step 1 of 2 for Linear\): accumulated gradients"):
                accelerator.save_state(str(tmp_path / "early"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accelerator.save_state(str(tmp_path / "late"))


def test_windows_count_only_a_models_batches() -> None:
    modules = [_model(1), _model(2)]
    batches = list(_rows(12).split(2))
    for module, sign, own in ((modules[0], 1, batches), (modules[1], 2, batches[1::2])):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for start in range(0, len(own), WINDOW):
            for rows in own[start : start + WINDOW]:
                (_loss(module, rows, sign) / WINDOW).backward()
            optimizer.step()
            optimizer.zero_grad()
    for weights in ranks.run(_train_by_turns, 2):
        assert weights == pytest.approx(_weights(modules), rel=1e-12)


def test_other_models_in_the_middle_of_a_window_are_an_error() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    first, second = accelerator.prepare(_model(1), _model(2))
    with accelerator.accumulate(first, second):
        pass
    with pytest.raises(
        RuntimeError, match=r"^accumulate\(Linear\) was entered in the middle of the window of "
    ):
        accelerator.accumulate(first).__enter__()
    with accelerator.accumulate(first, second):
        assert accelerator.sync_gradients
    with accelerator.accumulate(first):  # the window is over
        assert not accelerator.sync_gradients


def test_one_optimizer_for_separate_windows_is_an_error() -> None:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    first, second = accelerator.prepare(_model(1), _model(2))
    optimizer = accelerator.prepare(torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1))
    for _ in range(2):
        with accelerator.accumulate(first):
            pass
        if not accelerator.sync_gradients:
            with accelerator.accumulate(second):
                optimizer.step()
    with pytest.raises(
        RuntimeError, match=r"by accumulate\(Linear\) and accumulate\(Linear\), and their windows end"
    ):
        optimizer.step()


# --- the last window --------------------------------------------------------------------------------------------------


class _Stream(IterableDataset[torch.Tensor]):
    """A dataset without a length."""

    def __iter__(self) -> Any:
        return iter(_rows())


def _train(divides: bool | None, is_stream: bool, precision: str = "no", clips: bool = False) -> list[float]:
    plugin = GradientAccumulationPlugin(num_steps=WINDOW, divide_by_actual=divides)
    config = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(
        gradient_accumulation_plugin=plugin, dataloader_config=config, mixed_precision=precision
    )
    module = _model(1)
    model = accelerator.prepare(module)
    optimizer = accelerator.prepare(torch.optim.SGD(module.parameters(), lr=0.1))
    loader = accelerator.prepare(DataLoader(_Stream() if is_stream else _rows(), batch_size=2))
    for _ in range(2):
        for rows in loader:
            with accelerator.accumulate(model):
                accelerator.backward(_loss(model, rows, 1))
                if clips and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1e6)
                optimizer.step()
                optimizer.zero_grad()
    return _weights([module])


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("divides", [None, False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_gradients_of_a_short_window_are_divided_as_asked(
    divides: bool | None, is_stream: bool, clips: bool
) -> None:
    expected = _alone(2, WINDOW, (1,), divides_by_actual=bool(divides))
    for weights in ranks.run(_train, 2, divides, is_stream, "no", clips):
        assert weights == pytest.approx(expected, rel=1e-12)


def _beside(number: int, other: str) -> tuple[list[float], int]:
    """Train on this many rows, one per micro-step, while another loader is read; also return the number of steps."""
    accelerator = Accelerator(
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=WINDOW, divide_by_actual=True)
    )
    model, loader, longer = accelerator.prepare(
        _model(1), DataLoader(_rows(number)), DataLoader(_rows(number + 3))
    )
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    num_steps = 0

    def step(rows: torch.Tensor) -> None:
        nonlocal num_steps
        with accelerator.accumulate(model):
            accelerator.backward(_loss(model, rows, 1))
            num_steps += accelerator.sync_gradients
            optimizer.step()
            optimizer.zero_grad()

    for _ in range(2):
        if other == "after":
            for rows, _ in zip(loader, longer, strict=False):
                step(rows)
        elif other == "before":
            for _, rows in zip(longer, loader, strict=False):
                step(rows)
        elif other == "between":
            evaluated = iter(longer)
            for rows in loader:
                step(rows)
                next(evaluated)
        else:
            for _ in accelerator.prepare(DataLoader(_rows(1))):  # always at its last batch
                for rows in loader:
                    step(rows)
    return _weights([model]), num_steps


@pytest.mark.parametrize("number", [2, 5])
@pytest.mark.parametrize("other", ["after", "before", "between", "around"])
def test_the_end_of_a_loader_closes_the_window(number: int, other: str) -> None:
    weights, num_steps = _beside(number, other)
    model, batches = _model(1), _rows(number).split(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    windows = [batches[start : start + WINDOW] for start in range(0, number, WINDOW)] * 2
    for window in windows:
        for rows in window:
            (_loss(model, rows, 1) / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert num_steps == len(windows)
    assert weights == pytest.approx(_weights([model]), rel=1e-12)


def test_short_windows_warn_once_about_their_divisor() -> None:
    for divides in (None, False, True):
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            _train(divides, False)
        texts = [str(one.message) for one in shown]
        assert len(texts) == (divides is None)
        assert all(
            "has 1 of 2 micro-steps" in text and "divide_by_actual=True) divides by 1" in text
            for text in texts
        )


def test_micro_steps_of_one_batch_count_as_they_are() -> None:
    """Every micro-step of a loader's last batch ends a window, so each window has one micro-step."""
    plugin = GradientAccumulationPlugin(num_steps=3, divide_by_actual=True)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin)
    module = _model(1)
    model, optimizer = accelerator.prepare(module, torch.optim.SGD(module.parameters(), lr=0.1))
    expected, theirs = _model(1), _rows(4)
    for rows in accelerator.prepare(DataLoader(theirs, batch_size=4)):
        for half in rows.split(2):
            with accelerator.accumulate(model):
                accelerator.backward(_loss(model, half, 1))
                optimizer.step()
                optimizer.zero_grad()
    for half in theirs.split(2):
        gradients = torch.autograd.grad(_loss(expected, half, 1), list(expected.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(expected.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    assert _weights([module]) == pytest.approx(_weights([expected]), rel=1e-12)


def _count_tokens(divides: bool | None) -> list[float]:
    """Train with a window's loss as the sum over its tokens divided by their number, for any number of micro-steps."""
    plugin = GradientAccumulationPlugin(num_steps=WINDOW, divide_by_actual=divides)
    accelerator = Accelerator(gradient_accumulation_plugin=plugin, split_batches=True)
    module = _model(1)
    model = accelerator.prepare(module)
    optimizer = accelerator.prepare(torch.optim.SGD(module.parameters(), lr=0.1))
    batches = list(accelerator.prepare(DataLoader(_rows(), batch_size=2)))
    for start in range(0, len(batches), WINDOW):
        part = batches[start : start + WINDOW]
        count = accelerator.gather(torch.tensor([sum(len(rows) for rows in part)])).sum().item()
        for number, rows in enumerate(part):
            with ExitStack() as stack:
                if number < len(part) - 1:
                    stack.enter_context(accelerator.no_sync(model))
                loss = (model(rows) - rows.prod(1, keepdim=True)).pow(2).sum()
                accelerator.backward(loss * WINDOW * accelerator.num_processes / count)
        optimizer.step()
        optimizer.zero_grad()
    return _weights([module])


@pytest.mark.parametrize("divides", [None, True])
def test_losses_that_are_divided_by_a_count_of_tokens_stay_exact(divides: bool | None) -> None:
    expected = _model(1)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for part in _rows().split(2 * WINDOW):
        _loss(expected, part, 1).backward()
        optimizer.step()
        optimizer.zero_grad()
    for weights in ranks.run(_count_tokens, 2, divides):
        assert weights == pytest.approx(_weights([expected]), rel=1e-12)


def test_deepspeed_keeps_the_gradients_of_a_window_itself() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, divide_by_actual=True)
    with pytest.raises(ValueError, match="divide_by_actual=True can't be used with DeepSpeed"):
        DeepSpeedPlugin().accumulation_settings(plugin)
