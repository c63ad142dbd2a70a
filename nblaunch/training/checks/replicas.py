"""Checks for replicated models, whose gradients, weights and statistics must be equal on all ranks.

Each rank sends a few elements, and the launcher compares them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from nblaunch.training.checks.check import Check, Prepared, parameters_of

_NUM_TENSORS = 64
_NUM_ELEMENTS = 2  # of each tensor
_NUM_PASSES = 8
"""Number of initial backward passes in which the check counts how often weights change."""


class DifferentReplicas(Check):
    """Ranks step with different gradients or weights, so each trains a different model.

    Models that the user averages in another way are left out: models with a communication hook, and models in
    :class:`~nblaunch.LocalSGD` (``left_out``). An optimizer may update only a share of the parameters on each
    rank, as ``ZeroRedundancyOptimizer`` does, so only ranks that update the same parameters are compared.
    """

    name = "replicas_differ"

    def __init__(self) -> None:
        self.left_out: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def before_step(self, prepared: Prepared, optimizer: torch.optim.Optimizer) -> None:
        owned = {id(parameter) for parameter in parameters_of(optimizer)}
        for model in _replicated(prepared):
            if model in self.left_out:
                continue
            averaged = _averaged(model)
            places = [place for place, parameter in enumerate(averaged) if id(parameter) in owned]
            if not places:
                continue
            trained = [averaged[place] for place in places]
            gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
            name, share = type(model.module).__name__, hash(tuple(places))
            # Report weights first: if these differ, so do gradients.
            self.report(
                f"the weights of the {name} differ between ranks",
                "Load or change weights before prepare(), which sends the weights of rank 0 to all ranks, or make "
                "the same change on every rank",
                value=(f"weights {share}", *elements_of(trained)),
                judged_by="equal",
            )
            self.report(
                f"the gradients of the {name} differ between ranks when the optimizer steps, because nothing has "
                "averaged them",
                _advice(model),
                value=(f"gradients {share}", *elements_of(gradients)),
                judged_by="equal",
            )


class StepsOnSomeRanks(Check):
    """Optimizers step on some ranks only, for example on the main process, and the other ranks' weights never change.

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
            seen.add(elements_of(_averaged(model)))
            often = seen.num_changes > _NUM_PASSES // 2
            if seen.num_passes == _NUM_PASSES and (often or not seen.num_changes):
                self.report(
                    f"optimizers change the {type(model.module).__name__} on some ranks only",
                    "Call optimizer.step() on every rank, even if only the main process saves and logs",
                    value=("changes", "often" if often else "never"),
                    judged_by="equal",
                    step=_NUM_PASSES,
                )


class Changes:
    """Number of times that the weights of a model have changed between backward passes."""

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
                    value=("statistics", *elements_of(means)),
                    judged_by="equal",
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
        # The user may have wrapped the model for a group with only some of the ranks.
        is_for_all = wrapper.process_group.size() == dist.get_world_size()
        if is_for_all and not getattr(wrapper, "_comm_hooks", ()):
            yield wrapper


def _averaged(model: DistributedDataParallel) -> list[torch.nn.Parameter]:
    ignored = getattr(model, "parameters_to_ignore", ())
    named = model.module.named_parameters()
    return [parameter for name, parameter in named if parameter.requires_grad and name not in ignored]


def elements_of(tensors: Sequence[torch.Tensor]) -> list[float]:
    """Return a few elements of a few of the ``tensors``, waiting for the device only once."""
    step = max(1, -(-len(tensors) // _NUM_TENSORS))
    flat = [
        tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _NUM_ELEMENTS)][:_NUM_ELEMENTS]
        for tensor in tensors[::step]
        if tensor.numel() and tensor.layout is torch.strided
    ]
    taken = [(torch.view_as_real(part).reshape(-1) if part.is_complex() else part).double() for part in flat]
    elements: list[float] = torch.cat(taken).cpu().tolist() if taken else []
    return elements
