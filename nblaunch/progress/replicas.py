"""Compares the replicas of models that ``DistributedDataParallel`` keeps equal, just before optimizer steps.

Each rank sends a few elements of weights and gradients, and the launcher compares them. In loops with nblaunch's
Accelerator, ``training/checks/replicas.py`` decides when. In other loops, the steps are those whose gradients
:class:`~nblaunch.progress.same_samples.SameSamples` examines, the first few of a loop.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from nblaunch.context import ProcessContext
from nblaunch.user_code import innermost_user_frame

CHECK = "replicas_differ"
"""Name of this check in ``NBLAUNCH_CHECKS``."""

_NUM_STEPS = 10
_NUM_TENSORS = 64
_NUM_ELEMENTS = 2  # of each tensor


class Comparison(NamedTuple):
    """What an optimizer is about to update in a replicated model.

    Args:
        kind: ``"weights"`` or ``"gradients"``.
        problem: the problem if ranks have different values.
        share: identifies the parameters that are updated.
        elements: some of this rank's values.
    """

    kind: str
    problem: str
    share: int
    elements: Sequence[float]

    def value_of(self, number: int) -> tuple[Any, ...]:
        """Return the value of an observation of a model.

        Args:
            number: the model's number, equal on all ranks; models of one class have different numbers.
        """
        return (f"{self.kind} {number} {self.share}", *self.elements)


def comparisons(model: Any, optimizer: Any) -> Iterator[Comparison]:
    """Yield what ranks must have in common before ``optimizer`` updates a ``DistributedDataParallel`` model.

    An optimizer may update only a share of the parameters on each rank, as ``ZeroRedundancyOptimizer`` does, so only
    ranks that update the same parameters are compared.
    """
    owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    averaged = averaged_by(model)
    places = [place for place, parameter in enumerate(averaged) if id(parameter) in owned]
    if not places:
        return
    trained = [averaged[place] for place in places]
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    name, share = type(model.module).__name__, hash(tuple(places))
    # Weights come first: if these differ, so do gradients.
    yield Comparison(
        "weights",
        f"the weights of the {name} differ between ranks",
        share,
        elements_of(trained),
    )
    yield Comparison(
        "gradients",
        f"the gradients of the {name} differ between ranks when the optimizer steps, because nothing has averaged them",
        share,
        elements_of(gradients),
    )


def is_replicated(model: Any) -> bool:
    """Return whether torch averages a wrapped model's gradients over all ranks of the job, without a hook.

    Models that were in a ``Join`` context are left out, because ranks with fewer batches count fewer steps.
    """
    import torch.distributed as dist

    if getattr(model, "_comm_hooks", ()) or model._join_config.enable:
        return False
    # The user may have wrapped the model for a group with only some of the ranks.
    return bool(model.process_group.size() == dist.get_world_size())


def averaged_by(model: Any) -> list[Any]:
    """Return the parameters whose gradients a ``DistributedDataParallel`` model averages."""
    ignored = getattr(model, "parameters_to_ignore", ())
    named = model.module.named_parameters()
    return [parameter for name, parameter in named if parameter.requires_grad and name not in ignored]


def elements_of(tensors: Sequence[Any]) -> list[float]:
    """Return a few elements of a few of the ``tensors``, waiting for the device only once."""
    import torch

    step = max(1, -(-len(tensors) // _NUM_TENSORS))
    flat = [
        tensor.detach().reshape(-1)[:: max(1, tensor.numel() // _NUM_ELEMENTS)][:_NUM_ELEMENTS]
        for tensor in tensors[::step]
        if tensor.numel() and tensor.layout is torch.strided
    ]
    taken = [(torch.view_as_real(part).reshape(-1) if part.is_complex() else part).double() for part in flat]
    elements: list[float] = torch.cat(taken).cpu().tolist() if taken else []
    return elements


_ADVICE = {
    "weights": "Load or change weights before you wrap the model in DistributedDataParallel, which sends the weights "
    "of rank 0 to all ranks, or make the same change on every rank",
    "gradients": "Call the DistributedDataParallel model, not the model inside it",
}


class PlainReplicas:
    """Compares replicas in the first steps of loops without nblaunch's Accelerator.

    Models that are updated after a forward pass under ``no_sync`` are left out from then on, because the user may
    average weights instead of gradients, as in local SGD. Optimizers of other libraries are left out, because they may
    average gradients in their steps.

    Args:
        here: the context of this process.
    """

    def __init__(self, here: ProcessContext) -> None:
        self._here = here
        self._num_steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._num_models = 0

    def before_step(self, optimizer: Any, models: Iterable[Any]) -> None:
        """Report what ``optimizer`` is about to update in the replicated models among ``models``."""
        if self._here.training is not None or not type(optimizer).__module__.startswith("torch."):
            return
        for model in models:
            step = self._num_steps.get(model, 0) + 1
            if (
                step > _NUM_STEPS
                or not is_replicated(model)
                or any(map(_may_communicate, averaged_by(model)))
            ):
                continue
            for comparison in comparisons(model, optimizer):
                if not model.require_forward_param_sync:
                    self._num_steps[model] = _NUM_STEPS
                    break
                self._num_steps[model] = step
                self._here.observe(
                    CHECK,
                    comparison.problem,
                    _ADVICE[comparison.kind],
                    innermost_user_frame(),
                    step=step,
                    value=comparison.value_of(self._number_of(model)),
                    judged_by="equal",
                )

    def _number_of(self, model: Any) -> int:
        """Return a model's number. Ranks begin to update models in the same order, because they average gradients."""
        if model not in self._numbers:
            self._num_models += 1
            self._numbers[model] = self._num_models
        return self._numbers[model]


def _may_communicate(tensor: Any) -> bool:
    """Return whether reading a tensor may wait for other ranks, as for a DTensor, which gathers its shards."""
    import torch

    return type(tensor) not in (torch.Tensor, torch.nn.Parameter)
