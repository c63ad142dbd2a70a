"""Checks for replicated models, whose gradients, weights and statistics must be equal on all ranks.

Each rank sends a few elements, and the launcher compares them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from nblaunch.progress import replicas
from nblaunch.training.checks import Check, Prepared

_NUM_PASSES = 8
"""Number of initial backward passes in which the check counts how often weights change."""


class DifferentReplicas(Check):
    """Ranks step with different gradients or weights, so each trains a different model.

    Models that the user averages in another way are left out: models with a communication hook, and models in
    :class:`~nblaunch.LocalSGD` (``left_out``).
    """

    name = replicas.CHECK

    def __init__(self) -> None:
        self.left_out: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def before_step(self, prepared: Prepared, optimizer: torch.optim.Optimizer) -> None:
        for number, model in enumerate(_replicated(prepared)):
            if model in self.left_out:
                continue
            for comparison in replicas.comparisons(model, optimizer):
                advice = _ADVICE_ON_WEIGHTS if comparison.kind == "weights" else _advice(model)
                self.report(comparison.problem, advice, value=comparison.value_of(number), judged_by="equal")


class StepsOnSomeRanks(Check):
    """Optimizers step only on some ranks, for example on the main process, so the other ranks' weights never change.

    Ranks may count passes differently, for example if one rank runs an additional backward pass, and they may
    accumulate gradients. The check therefore compares only two kinds of ranks: those whose weights changed in most of
    the first passes, and those whose weights never changed.
    """

    name = "steps_on_some_ranks"

    def __init__(self) -> None:
        self._seen: weakref.WeakKeyDictionary[torch.nn.Module, Changes] = weakref.WeakKeyDictionary()

    def before_backward(self, prepared: Prepared, loss: torch.Tensor, options: Mapping[str, Any]) -> None:
        if prepared.strategy.steps_by_engine:
            return
        for model in _replicated(prepared):
            seen = self._seen.setdefault(model, Changes())
            if seen.num_passes >= _NUM_PASSES:
                continue
            seen.add(replicas.elements_of(replicas.averaged_by(model)))
            often = seen.num_changes > _NUM_PASSES // 2
            if seen.num_passes == _NUM_PASSES and (often or not seen.num_changes):
                self.report(
                    f"optimizers change the {type(model.module).__name__} only on some ranks",
                    "Call optimizer.step() on every rank, even if only the main process saves and logs",
                    value=("changes", "often" if often else "never"),
                    judged_by="equal",
                    step=_NUM_PASSES,
                )


class Changes:
    """Counts how often a model's weights have changed between backward passes."""

    def __init__(self) -> None:
        self.num_passes = self.num_changes = 0
        self._last: list[float] | None = None

    def add(self, weights: list[float]) -> None:
        """Count a backward pass; ``weights`` are the values that a few weights had before it."""
        self.num_changes += self._last is not None and weights != self._last
        self.num_passes += 1
        self._last = weights


class DifferentStatistics(Check):
    """Ranks evaluated a model with different batch normalisation statistics."""

    name = "statistics_differ"

    def after_evaluation(self, prepared: Prepared) -> None:
        for model in _replicated(prepared):
            layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
            means = [layer.running_mean for layer in layers if layer.running_mean is not None]
            if means and not model.training:
                self.report(
                    f"ranks have evaluated the {type(model.module).__name__} with different "
                    f"{type(layers[0]).__name__} statistics",
                    "Leave broadcast_buffers=True, convert the model with "
                    "torch.nn.SyncBatchNorm.convert_sync_batchnorm, or evaluate the model that accelerator.prepare() "
                    "returned",
                    value=("statistics", *replicas.elements_of(means)),
                    judged_by="equal",
                )


_ADVICE_ON_WEIGHTS = (
    "Load or change weights before prepare(), which sends rank 0's weights to all ranks, or make the same change "
    "on every rank"
)


def _advice(model: DistributedDataParallel) -> str:
    """Return what to do about gradients that DDP has not averaged."""
    missing = [
        name
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad and parameter.grad is None
    ]
    if missing and not model.find_unused_parameters:
        return (
            f"DistributedDataParallel waits for the gradients of unused parameters, such as {missing[0]}. Pass "
            "Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]), and call the "
            "model that accelerator.prepare() returned"
        )
    return (
        "Call the model that accelerator.prepare() returned, not the one that was passed to it, and leave no_sync() "
        "before the last backward pass of a step"
    )


def _replicated(prepared: Prepared) -> Iterator[DistributedDataParallel]:
    """Yield the models whose gradients torch averages over all ranks of the job, without a communication hook."""
    if prepared.shared.parallelism is not None:
        return
    for model in prepared.models:
        wrapper = getattr(model, "_orig_mod", model)
        if not isinstance(wrapper, DistributedDataParallel):
            continue
        if replicas.is_replicated(wrapper):
            yield wrapper
