"""The checks of ``nblaunch test``: each launches a job on this machine's devices and checks the results.

A check returns a sentence that says what worked, or raises :class:`CheckFailed` with the evidence. Each check has its
own job, so that a check that hangs or breaks a device does not affect the others. The workers' functions are written
as a user would write them; most return a list of sentences, one for each wrong result on their rank.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed.fsdp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nblaunch.backends.base import Backend
from nblaunch.launcher.job import Job
from nblaunch.launcher.plan import plan_launch
from nblaunch.launcher.runner import JobRunner
from nblaunch.spec import LaunchSpec
from nblaunch.training.accelerator import Accelerator
from nblaunch.training.strategies.fsdp2.strategy import FullyShardedDataParallelPlugin

_HANG_TIMEOUT_S = 45.0
_BATCH_SIZE = 4
_NUM_STEPS = 6
_NUM_FEATURES = 12


class CheckFailed(Exception):
    """A wrong result; the message contains the expected and actual values, and the ranks."""


@dataclass(frozen=True)
class Setup:
    """Settings of the checks' jobs.

    Args:
        spec: settings of a job that does nothing.
        tolerance: largest accepted relative difference between weights; the order of summation may differ.
    """

    spec: LaunchSpec
    tolerance: float

    def run(self, function: Callable[..., Any], *args: Any) -> Job:
        """Run ``function`` in a job; the job's value is a list with each rank's value."""
        spec = replace(
            self.spec,
            function=function,
            args=args,
            return_all=True,
            hang_timeout_s=_HANG_TIMEOUT_S,
            on_hang="stop",
        )
        job = JobRunner(spec, plan_launch(spec))
        job.run()
        return job

    def expect_no_errors(self, function: Callable[..., Any], *args: Any) -> None:
        """Run ``function`` in a job; raise :class:`CheckFailed` with the wrong results that ranks return."""
        wrong_results = self.run(function, *args).result()
        lines = [f"rank {rank}: {text}" for rank, wrong in enumerate(wrong_results) for text in wrong]
        if lines:
            raise CheckFailed("\n".join(lines))


Check = Callable[[Setup], str]


# --- results ---------------------------------------------------------------------------------------------------------


def check_collectives(setup: Setup) -> str:
    """Check the results of every collective operation."""
    setup.expect_no_errors(_collectives)
    return "gather, reduce, broadcast, pad and gather_object are correct on every rank"


def _collectives() -> list[str]:
    accelerator = Accelerator()
    rank, count = accelerator.process_index, accelerator.num_processes
    local = torch.tensor([float(rank), 10.0 * rank], device=accelerator.device)
    ragged = torch.full((rank + 1,), float(rank), device=accelerator.device)
    total = count * (count - 1) / 2
    padded = [[float(other)] * (other + 1) + [-1.0] * (count - other - 1) for other in range(count)]
    checks: dict[str, tuple[torch.Tensor, list[float]]] = {
        "gather": (
            accelerator.gather(local),
            [number for other in range(count) for number in (other, 10 * other)],
        ),
        "reduce(sum)": (accelerator.reduce(local, "sum"), [total, 10 * total]),
        "reduce(mean)": (accelerator.reduce(local, "mean"), [total / count, 10 * total / count]),
        "broadcast": (
            accelerator.broadcast(local + 1, from_process=count - 1),
            [count, 10 * (count - 1) + 1],
        ),
        "pad_across_processes": (
            accelerator.gather(accelerator.pad_across_processes(ragged, pad_index=-1)),
            [number for row in padded for number in row],
        ),
    }
    wrong = [
        f"{name} gave {actual.tolist()}, expected {[float(number) for number in expected]}"
        for name, (actual, expected) in checks.items()
        if actual.tolist() != expected
    ]
    objects = accelerator.gather_object([f"rank {rank}"])
    if objects != [f"rank {other}" for other in range(count)]:
        wrong.append(f"gather_object gave {objects}")
    return wrong


def check_gradients(setup: Setup) -> str:
    """Check that training on all ranks gives the same weights as training in one process."""
    setup.expect_no_errors(_gradients, setup.tolerance)
    return "the weights equal those that a single process computes from the same samples"


def check_sharded(setup: Setup) -> str:
    """Check that training with sharded weights gives the same weights as training in one process."""
    setup.expect_no_errors(_gradients, setup.tolerance, FullyShardedDataParallelPlugin())
    return "sharded weights (FSDP2) equal those that a single process computes from the same samples"


def _gradients(tolerance: float, plugin: FullyShardedDataParallelPlugin | None = None) -> list[str]:
    accelerator = Accelerator(fsdp_plugin=plugin)
    reference = _build_model().to(accelerator.device)
    data = _dataset(_NUM_STEPS * _BATCH_SIZE * accelerator.num_processes)
    prepared = _train(accelerator, copy.deepcopy(reference), data)
    optimizer = _optimizer(reference)
    for features, targets in islice(DataLoader(data, _BATCH_SIZE * accelerator.num_processes), _NUM_STEPS):
        outputs = reference(features.to(accelerator.device))
        nn.functional.mse_loss(outputs, targets.to(accelerator.device)).backward()
        optimizer.step()
        optimizer.zero_grad()
    # If the weights are sharded, only the main process has all of them.
    trained = accelerator.get_state_dict(prepared)
    return _differences(dict(reference.named_parameters()), trained, tolerance, "single-process training")


def check_metrics(setup: Setup) -> str:
    """Check that metrics count every sample once, even if ranks have unequal numbers of samples."""
    setup.expect_no_errors(_metrics)
    return "gather_for_metrics returns every sample once, in order, even if the ranks have unequal numbers of samples"


def _metrics() -> list[str]:
    accelerator = Accelerator()
    length = 2 * _BATCH_SIZE * accelerator.num_processes + 3
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(length)), batch_size=_BATCH_SIZE))
    seen = [number for (batch,) in loader for number in accelerator.gather_for_metrics(batch).tolist()]
    expected = list(range(length))
    return [] if seen == expected else [f"gather_for_metrics gave the samples {seen}, expected {expected}"]


def check_checkpoint(setup: Setup) -> str:
    """Check that training continues from a checkpoint as if it had not been interrupted."""
    with tempfile.TemporaryDirectory() as folder:
        setup.expect_no_errors(_checkpoint, str(Path(folder, "state")), setup.tolerance)
    return "training after load_state matches training after save_state (weights, optimizer, random numbers)"


def _checkpoint(folder: str, tolerance: float) -> list[str]:
    accelerator = Accelerator()
    model = nn.Sequential(nn.Dropout(0.3), *_build_model())
    data = _dataset(_NUM_STEPS * _BATCH_SIZE * accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=0.05), DataLoader(data, batch_size=_BATCH_SIZE)
    )
    batches = list(loader)

    def steps(chosen: Sequence[list[torch.Tensor]]) -> None:
        for features, targets in chosen:
            accelerator.backward(nn.functional.mse_loss(model(features), targets))
            optimizer.step()
            optimizer.zero_grad()

    half = len(batches) // 2
    steps(batches[:half])
    accelerator.save_state(folder)
    steps(batches[half:])
    first = {name: weights.clone() for name, weights in accelerator.get_state_dict(model).items()}
    accelerator.load_state(folder)
    steps(batches[half:])
    return _differences(first, accelerator.get_state_dict(model), tolerance, "the steps before load_state")


def check_weights_back(setup: Setup) -> str:
    """Check that the trained weights are loaded into the module that was passed."""
    model = _build_model()
    before = _first_weights(model)
    trained = setup.run(_train_passed_model, model).result()[0]
    after = _first_weights(model)
    if after != trained:
        raise CheckFailed(
            f"rank 0's trained weights begin with {trained}, but the weights here begin with {after}"
        )
    if after == before:
        raise CheckFailed(f"training did not change the weights: they still begin with {before}")
    return "the model in args has rank 0's trained weights"


def _train_passed_model(model: nn.Module) -> list[float]:
    accelerator = Accelerator()
    data = _dataset(_BATCH_SIZE * accelerator.num_processes)
    return _first_weights(accelerator.unwrap_model(_train(accelerator, model, data)))


def check_errors(setup: Setup) -> str:
    """Check that an exception on one rank is raised here and ends the job."""
    error = setup.run(_raise_in_last_rank).exception()
    if not isinstance(error, ZeroDivisionError) or "on purpose" not in str(error):
        raise CheckFailed(f"the last rank raised ZeroDivisionError, but the job raised {error!r}")
    return "an exception on one rank is raised here and ends the other ranks"


def _raise_in_last_rank() -> None:
    accelerator = Accelerator()
    if accelerator.is_last_process:
        raise ZeroDivisionError(f"raised on purpose on rank {accelerator.process_index}")
    accelerator.wait_for_everyone()


CHECKS: dict[str, Check] = {
    "collectives": check_collectives,
    "gradients": check_gradients,
    "sharded": check_sharded,
    "metrics": check_metrics,
    "checkpoint": check_checkpoint,
    "weights-back": check_weights_back,
    "errors": check_errors,
}


def supported(backend: Backend) -> list[str]:
    """Return the names of the checks that can run on a backend.

    FSDP2 needs torch 2.6 and does not run on XLA devices.
    """
    can_shard = hasattr(torch.distributed.fsdp, "fully_shard") and not backend.reduces_gradients_at_step
    return [name for name in CHECKS if name != "sharded" or can_shard]


# --- a model and its data --------------------------------------------------------------------------------------------


def _build_model() -> nn.Sequential:
    """Return a small network with the same weights in every call and on every rank."""
    generator = torch.Generator().manual_seed(7)
    model = nn.Sequential(nn.Linear(_NUM_FEATURES, 32), nn.Tanh(), nn.Linear(32, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def _first_weights(model: nn.Module) -> list[float]:
    return [float(number) for number in next(model.parameters()).detach().flatten()[:8].cpu()]


def _dataset(length: int) -> TensorDataset:
    features = torch.randn(length, _NUM_FEATURES, generator=torch.Generator().manual_seed(11))
    return TensorDataset(features, features.sum(dim=1, keepdim=True).sin())


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _train(accelerator: Accelerator, model: nn.Module, data: TensorDataset) -> nn.Module:
    """Train on all ranks and return the prepared model."""
    prepared, optimizer, loader = accelerator.prepare(
        model, _optimizer(model), DataLoader(data, batch_size=_BATCH_SIZE)
    )
    for features, targets in loader:
        accelerator.backward(nn.functional.mse_loss(prepared(features), targets))
        optimizer.step()
        optimizer.zero_grad()
    return prepared


def _differences(
    expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor], tolerance: float, what: str
) -> list[str]:
    """Return a sentence for each tensor in ``actual`` whose relative difference exceeds ``tolerance``."""
    wrong = []
    for name, weights in actual.items():
        wanted = expected[name].detach().cpu()
        difference = float((wanted - weights.detach().cpu()).abs().max())
        allowed = tolerance * max(1e-3, float(wanted.abs().max()))
        if not difference <= allowed:  # also true for NaN
            wrong.append(f"{name} differs from {what} by {difference:.3g} (allowed: {allowed:.3g})")
    return wrong
