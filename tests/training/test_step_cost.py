"""The additional work of a training step on the host, compared with a plain loop: Python calls and torch operations.

The tests count them, because times would differ on a busy machine.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset, dataloader

from nblaunch import Accelerator, backends, context
from nblaunch.launcher.plan import plan_launch
from nblaunch.launcher.runner import JobRunner
from nblaunch.spec import LaunchSpec
from tests.benchmarks.bench import count_calls

SHORT, LONG = 10, 30
NUM_EPOCHS = 3
# Additional Python calls that a step may make in a process without a launcher.
MAX_CALLS = {"fixed batch": 6, "accumulate": 11, "loader": 7, "loader, accumulate": 13}
MAX_CALLS_IN_WORKER = {"loader": 19, "loader, accumulate": 23}
Lap = Callable[[], object]


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def _parts(num_steps: int) -> tuple[Any, ...]:
    model = torch.nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.ones(num_steps, 2)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1), loader


def _plain(num_steps: int, has_loader: bool) -> Lap:
    model, sgd, loader = _parts(num_steps)
    source: Any = loader if has_loader else [[torch.ones(1, 2)]] * num_steps

    def lap() -> None:
        for (inputs,) in source:
            model(inputs).sum().backward()
            sgd.step()
            sgd.zero_grad()

    return lap


def _accelerated(num_steps: int, has_loader: bool, accumulates: bool) -> Lap:
    accelerator = Accelerator()
    model, sgd, loader = accelerator.prepare(*_parts(num_steps))
    source: Any = loader if has_loader else [[torch.ones(1, 2)]] * num_steps

    def step(inputs: torch.Tensor) -> None:
        accelerator.backward(model(inputs).sum())
        sgd.step()
        sgd.zero_grad()

    def lap() -> None:
        for (inputs,) in source:
            if accumulates:
                with accelerator.accumulate(model):
                    step(inputs)
            else:
                step(inputs)

    return lap


def _per_step(count: Callable[[Lap], int], loop: Callable[..., Lap], *kind: bool) -> float:
    """Return the count for one more step of a loop."""
    laps = [loop(num_steps, *kind) for num_steps in (SHORT, LONG)]
    # The first epoch searches for the loops around it and keeps the result. A signal may add calls to other epochs; the
    # smallest count is free of them.
    epochs = [[count(lap) for lap in laps] for _ in range(1 + NUM_EPOCHS)][1:]
    short, long = map(min, zip(*epochs, strict=True))
    return (long - short) / (LONG - SHORT)


def _added_calls() -> dict[str, float]:
    kinds = {"fixed batch": (False, False), "accumulate": (False, True), "loader": (True, False)}
    kinds["loader, accumulate"] = (True, True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nblaunch.progress.board_reports._LOSS_INTERVAL_S", 1e9)
        patch.setattr("nblaunch.progress.board_reports._MEMORY_INTERVAL_S", 1e9)
        patch.setattr("nblaunch.progress.board_reports._BUSY_INTERVAL_S", 1e9)
        patch.setattr("nblaunch.progress.plain_loops._PLACE_S", 1e9)
        ours = {
            name: _per_step(count_calls, _accelerated, *kind) - 1 for name, kind in kinds.items()
        }  # without step()
        _unhook(patch)
        return {name: ours[name] - _per_step(count_calls, _plain, kind[0]) for name, kind in kinds.items()}


def _unhook(patch: pytest.MonkeyPatch) -> None:
    """Remove a worker's hooks from torch."""
    iterator: Any = dataloader._BaseDataLoaderIter
    patch.setattr(torch.autograd, "backward", inspect.unwrap(torch.autograd.backward))
    patch.setattr(iterator, "__next__", inspect.unwrap(iterator.__next__))
    patch.setattr(optimizer, "_global_optimizer_pre_hooks", OrderedDict())
    patch.setattr(optimizer, "_global_optimizer_post_hooks", OrderedDict())


@pytest.fixture(autouse=True)
def _nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove other tests' hooks, and the checks, which run in the first steps and in a few later ones."""
    _unhook(monkeypatch)
    monkeypatch.setenv("NBLAUNCH_CHECKS", "off")


@pytest.fixture
def without_launcher() -> None:
    context.install(context.ProcessContext(context.Topology(), backends.choose("cpu"), is_watched=False))


@pytest.mark.usefixtures("without_launcher")
def test_a_step_adds_few_calls_of_python_functions() -> None:
    added = _added_calls()
    assert {name: calls for name, calls in added.items() if calls > MAX_CALLS[name]} == {}


def test_the_hooks_of_a_worker_add_few_more(nothing_left_behind: None) -> None:
    # Not on a fixed batch: the iterations of a loop without a loader are found by occasional inspections of the user's
    # code.
    spec = LaunchSpec(_added_calls, (), 1, backend="cpu")
    runner = JobRunner(spec, plan_launch(spec), [])
    runner.run()
    added = runner.result()
    assert {name: added[name] for name, limit in MAX_CALLS_IN_WORKER.items() if added[name] > limit} == {}


def test_a_step_adds_one_operation_that_reads_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nblaunch.progress.board_reports._LOSS_INTERVAL_S", 1e9)
    assert _added_operations() == [["aten._local_scalar_dense.default"] * SHORT] * 4


@pytest.mark.usefixtures("without_launcher")
def test_a_step_without_a_launcher_adds_no_operation() -> None:
    assert _added_operations() == [[]] * 4


def _added_operations() -> list[list[str]]:
    """Return the operations that an epoch adds: with a fixed batch and a loader, without and with accumulation."""

    def names(loop: Callable[..., Lap], *kind: bool) -> list[str]:
        lap = loop(SHORT, *kind)
        lap()
        with Operations() as operations:
            lap()
        return operations.names

    epochs = []
    for has_loader in (False, True):
        for accumulates in (False, True):
            epochs.append(names(_accelerated, has_loader, accumulates))
            for name in names(_plain, has_loader):
                epochs[-1].remove(name)
    return epochs


def test_a_step_on_a_device_adds_one_operation_and_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nblaunch.progress.board_reports._LOSS_INTERVAL_S", 1e9)
    accelerator = Accelerator()
    weight = torch.nn.Parameter(torch.ones(2, device="meta"))
    accelerator.backward(weight.sum())
    with Operations() as operations:
        weight.sum().backward()
    plain = operations.names
    with Operations() as operations:
        accelerator.backward(weight.sum())
    for name in plain:
        operations.names.remove(name)
    assert operations.names == ["aten.detach.default", "aten.add_.Tensor"]  # the first one computes nothing
