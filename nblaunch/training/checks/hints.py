"""Hints: behaviour that is often a mistake, but may be intended. By default, only their number is shown."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from nblaunch import formatting
from nblaunch.progress.loss_graphs import divisor_of
from nblaunch.progress.replicas import elements_of
from nblaunch.training.checks import Check, Prepared, parameters_of
from nblaunch.training.checks.replicas import Changes
from nblaunch.training.models import bare_module

_NUM_STEPS = 3
_MAX_NAMED = 4
_MAX_TERMS = 64


class LossDividedTwice(Check):
    """The loop divides losses by the number of micro-steps, although ``accelerator.backward`` already does so."""

    name = "loss_divided_twice"
    is_hint = True

    def __init__(self) -> None:
        self._count = 0

    def before_backward(self, prepared: Prepared, loss: torch.Tensor, options: Mapping[str, Any]) -> None:
        num_steps = prepared.accumulation.num_steps if options.get("scale_wrt_gas", True) else 1
        if num_steps == 1 or divisor_of(loss) != num_steps:
            return
        divided: Any = loss.grad_fn
        if _num_terms(divided.next_functions[0][0]) != num_steps:  # not the mean of several losses
            self._count += 1
            if self._count == _NUM_STEPS:
                self.report(
                    f"losses are divided by {num_steps} before accelerator.backward(), which divides them by "
                    f"gradient_accumulation_steps={num_steps} as well",
                    "Pass the undivided loss",
                )


def _num_terms(made_by: Any) -> int:
    """Return how many terms a sum has; 1 for any other operation."""
    num_terms, left = 0, [made_by]
    while left and num_terms < _MAX_TERMS:
        operation = left.pop()
        if type(operation).__name__ == "AddBackward0":
            left += [term for term, _ in operation.next_functions if term is not None]
        else:
            num_terms += 1
    return num_terms


class TrainModeEvaluation(Check):
    """A loop without gradients runs a model with dropout or batch normalisation in training mode."""

    name = "evaluation_in_train_mode"
    is_hint = True

    def __init__(self) -> None:
        self._versions: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()

    def before_loop(self, prepared: Prepared) -> None:
        self._versions.clear()
        if torch.is_grad_enabled():
            return  # a training loop
        for model in map(bare_module, prepared.models):
            self._versions.update((layer, _version(layer)) for layer in model.modules())

    def after_evaluation(self, prepared: Prepared) -> None:
        if torch.is_grad_enabled():
            return
        for model in map(bare_module, prepared.models):
            layers = [layer for layer in model.modules() if layer.training and _differs(layer)]
            # The loop might not run this model. Or it might run some layers on purpose, to recompute
            # statistics for averaged weights.
            is_used = all(_version(layer) != self._versions.get(layer) for layer in layers if _version(layer))
            kinds = {type(layer).__name__ for layer in layers}
            if kinds and is_used:
                self.report(
                    f"the {type(model).__name__} was evaluated in training mode, in which {', '.join(sorted(kinds))} "
                    "behaves differently",
                    "Call model.eval() before the evaluation, and model.train() after it",
                )


class EvalModeTraining(Check):
    """A model is trained in evaluation mode: a loop has called ``eval()`` but never ``train()``.

    A model with frozen parameters may be in evaluation mode on purpose.
    """

    name = "training_in_eval_mode"
    is_hint = True

    def begin_window(self) -> None:
        self._count = 0

    def before_step(self, prepared: Prepared, optimizer: torch.optim.Optimizer) -> None:
        stepped = {id(parameter) for parameter in parameters_of(optimizer) if parameter.grad is not None}
        for model in map(bare_module, prepared.models):
            kinds = {
                type(layer).__name__ for layer in model.modules() if not layer.training and _differs(layer)
            }
            is_stepped = all(id(parameter) in stepped for parameter in model.parameters())
            if model.training or not kinds or not is_stepped:
                continue
            self._count += 1
            if self._count == 2 * _NUM_STEPS:
                self.report(
                    f"the {type(model).__name__} is trained in evaluation mode, in which {', '.join(sorted(kinds))} "
                    "behaves differently",
                    "Call model.train() before training, and after each evaluation",
                )


def _differs(layer: torch.nn.Module) -> bool:
    """Return whether a layer computes something different in evaluation mode.

    Without momentum, the running statistics are means over all batches, which a loop in training mode computes on
    purpose.
    """
    if isinstance(layer, _BatchNorm):
        return layer.momentum is not None
    return isinstance(layer, _DropoutNd) and layer.p > 0


def _version(layer: torch.nn.Module) -> int:
    """Return a number that grows with each forward pass in training mode; 0 for a layer without running statistics."""
    count = (
        layer.num_batches_tracked if isinstance(layer, _BatchNorm) else None
    )  # torch does not count changes to running_mean
    return 0 if count is None else count._version + 1


class UntrainedParameters(Check):
    """Some parameters of an optimizer never get a gradient, although others do."""

    name = "parameters_without_gradients"
    is_hint = True

    def begin_window(self) -> None:
        self._counts: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._without: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()

    def before_step(self, prepared: Prepared, optimizer: torch.optim.Optimizer) -> None:
        trained = [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]
        without = {id(parameter) for parameter in trained if parameter.grad is None}
        without = self._without[optimizer] = self._without.get(optimizer, without) & without
        self._counts[optimizer] = self._counts.get(optimizer, 0) + 1
        if self._counts[optimizer] != 2 * _NUM_STEPS or not 0 < len(without) < len(trained):
            return
        names = [
            name
            for model in map(bare_module, prepared.models)
            for name, parameter in model.named_parameters()
            if id(parameter) in without
        ]
        if names:
            self.report(
                f"{formatting.first(names, _MAX_NAMED)} got no gradient in {2 * _NUM_STEPS} steps",
                "If the forward pass should use them, look for a detach() or a layer that is left out",
            )


class MetricOfOneShare(Check):
    """After an evaluation without a collective, the loop shows a metric, although ranks read different data."""

    name = "metric_of_one_share"
    is_hint = True

    def before_show(self, prepared: Prepared, shown: Any) -> None:
        metric = _METRIC.search(str(shown))
        names_rank = _RANK.search(str(shown))
        if metric is not None and names_rank is None and prepared.shared.num_data_ranks > 1:
            self.report(
                f"{metric[1]!r} is shown after an evaluation without a collective: it covers only this rank's samples",
                "Compute it from accelerator.gather_for_metrics((predictions, labels)) over all batches",
            )


_NAMES = "acc|accuracy|loss|f1|auc|auroc|bleu|rouge|mse|mae|rmse|perplexity|ppl|wer"
_METRIC = re.compile(
    rf"(?<!train.)(?<!training.)\b(?!train)((?:\w+_)?(?:{_NAMES}))\b\W{{1,4}}(?:tensor\(|np\.float\d+\()?\d*\.\d",
    re.IGNORECASE,
)
"""Text with a metric's name and value, unless the name says that the metric is computed in training."""

_RANK = re.compile(r"\b(?:rank|process|worker|gpu|device|shard)\b\W{0,3}\d", re.IGNORECASE)
"""Text that names a rank, which means that the loop shows that rank's metric on purpose."""


class DifferentOrders(Check):
    """The loop reads two loaders of equal length alternately, and each shuffles its samples differently."""

    name = "loaders_in_different_orders"
    is_hint = True

    def before_backward(self, prepared: Prepared, loss: torch.Tensor, options: Mapping[str, Any]) -> None:
        active = prepared.accumulation.loaders.innermost
        for other in prepared.accumulation.loaders.in_turns():
            first, second = (getattr(loader, "shuffled_by", ()) for loader in (active, other))
            if not first or not second or active.dataset is other.dataset:
                continue
            if len(active.dataset) == len(other.dataset) and first != second:
                self.report(
                    f"two loaders of {len(active.dataset):,} samples each, shuffled differently, are read alternately",
                    "If their samples belong together, put them into one dataset, and shuffle it with one loader",
                )


class NeverStepped(Check):
    """Gradients are computed and cleared, but no optimizer steps and no weights change."""

    name = "no_optimizer_steps"
    is_hint = True

    # A loop might only analyse gradients, or combine the gradients of many losses before it steps, so a later
    # step cancels the hint.

    def __init__(self) -> None:
        self._num_cleared = 0
        self._has_stepped = False
        self._changes = Changes()

    def before_step(self, prepared: Prepared, optimizer: torch.optim.Optimizer) -> None:
        if self._num_cleared >= 3 * _NUM_STEPS and not self._has_stepped:
            self.report("", "", judged_by="finally", step=0)
        self._has_stepped = True

    def before_backward(self, prepared: Prepared, loss: torch.Tensor, options: Mapping[str, Any]) -> None:
        # A gradient scaler skips steps, many of them at first.
        is_unseen = prepared.strategy.steps_by_engine or prepared.precision.scaler is not None
        is_over = self._has_stepped or self._num_cleared >= 3 * _NUM_STEPS
        if is_over or is_unseen or not prepared.optimizers:
            return
        trained = [parameter for optimizer in prepared.optimizers for parameter in parameters_of(optimizer)]
        is_cleared = all(parameter.grad is None or not parameter.grad.any() for parameter in trained)
        self._num_cleared = self._num_cleared + 1 if is_cleared else 0
        self._changes.add(elements_of(trained))
        if self._num_cleared == 3 * _NUM_STEPS and not self._changes.num_changes:
            self.report(
                f"gradients were computed and cleared {formatting.count(3 * _NUM_STEPS - 1, 'time')}, but no optimizer "
                "has stepped",
                "Call optimizer.step() before optimizer.zero_grad()",
                # Shown only if no rank steps; another check reports optimizers that step on only some ranks.
                judged_by="finally",
                step=0,
            )
