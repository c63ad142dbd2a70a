"""A note names modules that a function trains without getting them as arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nblaunch.launcher.weights import describe_uncollected_modules
from tests.kernels import Kernel
from tests.thorough import thorough

net = nn.Linear(2, 2)
frozen = nn.Linear(2, 2).requires_grad_(False)


def uses_global() -> object:
    return net, torch.ones(1)


def uses_nothing() -> object:
    return nn.Linear(2, 2)


def uses_frozen() -> object:
    return frozen


def takes(model: nn.Module, teacher: nn.Module | None = None) -> object:
    return model, teacher


class Trainer:
    def __init__(self) -> None:
        self.model, self.steps = nn.Linear(2, 2), 3

    def fit(self) -> object:
        return self.model

    def __call__(self) -> object:
        return self.model


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def fit(self) -> object:
        return self.weight


def closing_over(model: nn.Module) -> Callable[[], object]:
    @functools.wraps(uses_nothing)
    def train() -> object:
        return model

    del train.__wrapped__
    return train


def with_an_empty_cell() -> Callable[[], object]:
    def train() -> object:
        return model  # noqa: F821

    model = net
    del model
    return train


class Proxy:
    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("not bound yet")


proxy = Proxy()
lazy = nn.LazyLinear(3)


def uses_odd_things() -> object:
    return proxy, lazy, not_there  # type: ignore[name-defined]  # noqa: F821


FOUND: list[tuple[Callable[..., Any], str]] = [
    (uses_global, "net (Linear)"),
    (closing_over(net), "model (Linear)"),
    (lambda: takes(net), "net (Linear)"),
    (Trainer().fit, "self.model (Linear)"),
    (Trainer(), "self.model (Linear)"),
    (Own().fit, "self (Own)"),
    (functools.partial(takes, net, teacher=frozen), "argument 0 of the partial (Linear)"),
    (functools.partial(takes, model=net), "model (Linear)"),
    (functools.partial(takes, net, teacher=Own()), "argument 0 of the partial (Linear) and teacher (Own)"),
]


@pytest.mark.parametrize(("function", "named"), FOUND)
def test_modules_used_without_arguments_are_named(function: Callable[..., Any], named: str) -> None:
    assert describe_uncollected_modules(function, "train").startswith(
        f"train used {named} from the notebook, "
    )


@pytest.mark.parametrize(
    "function", [uses_nothing, uses_frozen, takes, print, dict, functools.partial(takes, frozen)]
)
def test_functions_without_trainable_modules_get_no_note(function: Callable[..., Any]) -> None:
    assert describe_uncollected_modules(function, "train") == ""


def test_unusual_objects_are_harmless() -> None:
    assert describe_uncollected_modules(uses_odd_things, "train").startswith(
        "train used lazy (LazyLinear) from "
    )


def test_only_training_cells_get_a_note(kernel: Kernel) -> None:
    kernel.run(
        """
import torch
from nblaunch import Accelerator, notebook_launcher
net = torch.nn.Linear(2, 1)
def train():
    accelerator = Accelerator()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model, optimizer = accelerator.prepare(net, optimizer)
    accelerator.backward(model(torch.ones(1, 2)).mean())
    optimizer.step()
def evaluate():
    return net(torch.ones(1, 2)).item()
"""
    )
    note = "train used net (Linear) from the notebook, which was not in args"
    trained = kernel.run("notebook_launcher(train, num_processes=2)").stdout
    assert note in trained
    assert "notebook_launcher(train, (model,))" in trained
    for quiet in (
        "notebook_launcher(evaluate, num_processes=2)",
        "notebook_launcher(train, num_processes=2, sync_weights=False)",
    ):
        assert "which was not in args" not in kernel.run(quiet).stdout


SEPARATE = """
import os, torch
from nblaunch import Accelerator, notebook_launcher
def train(models):
    with torch.no_grad():
        models[int(os.environ["RANK"])].weight.add_(1)
    return models[1].state_dict()
def evaluate(models):
    return Accelerator().prepare(models[0])(torch.ones(1, 2)).sum().item()
models = [torch.nn.Linear(2, 1) for _ in range(3)]
before = [model.weight.clone() for model in models]
"""


@pytest.mark.parametrize("start_method", ["fork", thorough("forkserver")])
def test_a_warning_names_models_that_another_rank_trains_alone(kernel: Kernel, start_method: str) -> None:
    kernel.run(SEPARATE)
    method = f"start_method={start_method!r}"
    shown = kernel.run(f"notebook_launcher(train, (models,), num_processes=2, {method})").shown
    assert "args[0][1] (Linear) changed only on rank 1" in shown
    assert "trained weights into args[0][0] (Linear)" in shown
    assert not any("not changed" in line and "args[0][1]" in line for line in shown.splitlines())
    kept = kernel.run(
        f"notebook_launcher(train, (models,), num_processes=2, return_all=True, {method})[1]"
    ).shown
    assert "args[0][1]" not in kept
    changed = "[not torch.equal(model.weight, weight) for model, weight in zip(models, before)]"
    assert kernel.run(changed).value == [True, False, False]
    assert (
        "changed only"
        not in kernel.run(f"notebook_launcher(evaluate, (models,), num_processes=2, {method})").shown
    )
