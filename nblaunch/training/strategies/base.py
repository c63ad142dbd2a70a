"""How a model is trained on several processes: :class:`Strategy`, and :class:`StrategyPlugin`, which chooses one.

A strategy gets the ranks, the device, the precision and the accumulation of its Accelerator in :class:`TrainingSetup`,
and what the user prepares in one call. ``prepare`` calls in this order:

    on_prepare         with all arguments of the call
    for each model:
                       (its layers and its forward get the precision; not the forward where ``casts_models``)
      place            moves it to its device, unless it stays where it is
      setup_module     wraps or shards it
      compile
    optimizer          for each, after all models
    scheduler          for each, after all optimizers

Loaders are prepared without it. A new strategy is one file with its plugin and its strategy, in this folder or in a
user's own code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from nblaunch import context, formatting
from nblaunch.backends.base import Backend
from nblaunch.errors import warn
from nblaunch.events import Note
from nblaunch.training import models
from nblaunch.training.accumulation import AccumulationState
from nblaunch.training.collectives import operations
from nblaunch.training.joining import JoinedProcess
from nblaunch.training.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from nblaunch.training.options import GradientAccumulationPlugin, TorchDynamoPlugin
from nblaunch.training.parallelism import ParallelismConfig
from nblaunch.training.precision import Precision


@dataclass(frozen=True)
class TrainingSetup:
    """What a strategy is built with.

    Args:
        process: the ranks, the backend and the device of this process.
        precision: the requested precision; a strategy may adapt it, see :meth:`Strategy.adapt_precision`.
        accumulation: when gradients are synchronised and optimizers step.
        splits_batches: whether a loader's batch is the global batch, which the ranks divide.
        parallelism: how the ranks are divided, its mesh made; None: all are replicas, or as the plugin says.
    """

    process: JoinedProcess
    precision: Precision
    accumulation: AccumulationState
    splits_batches: bool = False
    parallelism: ParallelismConfig | None = None


class ShardWriter(ABC):
    """Copies of this rank's shards, to be written while training goes on. Every rank calls one of the methods."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write the shards to ``folder``, from a thread, while training runs its own collectives.

        Raises:
            CheckpointError: a rank could not write its shards, or called :meth:`cancel`.
        """

    @abstractmethod
    def cancel(self, problem: str) -> None:
        """Keep all ranks from writing, because this rank has a ``problem``."""


class StrategyPlugin(ABC):
    """The choice of a strategy, with its settings: ``Accelerator(strategy=plugin)``.

    A strategy of your own needs no change in nblaunch. Write a plugin that builds it, in any module that the workers
    can import, and pass an object of it::

        class Whole(StrategyPlugin):
            name = "whole"

            def build(self, setup):
                return WholeStrategy()          # a Strategy with setup_module()

        accelerator = Accelerator(strategy=Whole())

    ``Accelerator(fsdp_plugin=...)`` and ``deepspeed_plugin=`` take plugins of this kind as well.
    """

    name: ClassVar[str] = ""
    """Name of the strategy that the plugin builds; checkpoints record it."""

    is_kept: ClassVar[bool] = False
    """Whether later Accelerators of the process also use this plugin, if the user passes them none."""

    @classmethod
    def from_argument(cls, argument: str, value: Any) -> StrategyPlugin:
        """Return the plugin for what a user passed.

        Args:
            argument: of the Accelerator.
            value: the object that the user passed for it.

        Raises:
            TypeError: ``value`` is not a plugin of this class.
        """
        if isinstance(value, cls):
            return value
        raise TypeError(
            f"{argument}={value!r:.80} is a {type(value).__module__}.{type(value).__name__}; pass a "
            f"nblaunch.{cls.__name__}, which has the same fields"
        )

    def precision_name(self, asked: str | None, backend: Backend) -> str | None:
        """Return the name of the precision that models compute in.

        Args:
            asked: ``mixed_precision`` of the Accelerator; None: the user did not set it.
            backend: the device family, which may not support it.

        Raises:
            ValueError: the settings contradict ``asked``, or the device does not support it.
        """
        return asked

    def accumulation_settings(self, asked: GradientAccumulationPlugin) -> GradientAccumulationPlugin:
        """Return the accumulation settings, given the ones that the user passed to the Accelerator.

        Raises:
            ValueError: the plugin's settings contradict ``asked``.
        """
        return asked

    @abstractmethod
    def build(self, setup: TrainingSetup) -> Strategy:
        """Return the strategy for one Accelerator.

        Raises:
            ValueError: the strategy can't be used on this device.
        """


class Strategy(ABC):
    """A way to train models on several processes. The module's description has the order of the calls."""

    name: str

    label = ""
    """Member of ``DistributedType`` for a job whose ranks hold shards; empty: the devices determine the label."""

    steps_by_engine = False
    """Whether an engine of another library steps optimizers and clears gradients, at moments of its own."""

    casts_models = False
    """Whether models that :meth:`setup_module` returns compute in the Accelerator's precision without autocast.

    FSDP2's do, by torch's ``MixedPrecisionPolicy``.
    """

    holds_shards = False
    """Whether a rank holds only shards of weights or optimizer states, so that all ranks take part in saving them."""

    shard_files = ""
    """Pattern of the checkpoint files that rank ``{rank}`` alone writes and checksums. Empty: rank 0 checksums all."""

    unjoined = ""
    """When :meth:`join_uneven_inputs` has no effect, for its warning: ``"with DeepSpeed"``; empty: no warning."""

    # --- preparing -----------------------------------------------------------------------------------------------

    def adapt_precision(self, precision: Precision) -> Precision:
        """Return the precision for models, without the part that the strategy handles itself."""
        return precision

    def on_prepare(self, objects: Sequence[Any]) -> None:
        """Check and record all arguments of one call of ``prepare``, before it prepares any of them.

        ``prepare_model`` and similar methods, which prepare one object, do not call this.
        """

    def place(self, model: torch.nn.Module, process: JoinedProcess) -> None:
        """Move the user's module to the device of this rank, before :meth:`setup_module`.

        A strategy whose :meth:`setup_module` moves the weights piece by piece overrides this to do nothing. It must not
        communicate: that would stall launches whose workers move their models one after the other.

        ``prepare`` does not call this with ``device_placement=False``, for a model that a device map or quantisation
        keeps in its place, or for a model that is only evaluated, which it moves itself.
        """
        models.to_device(model, process)

    @abstractmethod
    def setup_module(self, model: torch.nn.Module, process: JoinedProcess) -> torch.nn.Module:
        """Return ``model`` ready for training on this rank, wrapped or not; with rank 0's weights, if any is trained.

        ``prepare`` calls :meth:`place` before, and neither for models that are only evaluated.
        """

    def compile(self, model: torch.nn.Module, options: TorchDynamoPlugin) -> torch.nn.Module | None:
        """Compile a model in the strategy's own way; None: ``prepare`` compiles it like any module.

        Args:
            model: what :meth:`setup_module` returned; if it is only evaluated, the model as passed to ``prepare``.
            options: the compiler's settings.
        """
        return None

    def optimizer(self, optimizer: Any) -> AcceleratedOptimizer | None:
        """Return the prepared optimizer that replaces ``optimizer``; None: ``prepare`` wraps it, as it does most.

        ``prepare`` has prepared the models before. If it wraps an optimizer, :meth:`Replacements.hand_to
        <nblaunch.training.models.Replacements.hand_to>` gives it the parameters that have replaced its own.
        """
        return None

    def scheduler(self, scheduler: Any) -> AcceleratedScheduler | None:
        """Return the prepared scheduler that replaces ``scheduler``; None: ``prepare`` wraps it, as it does most."""
        return None

    def clear(self) -> None:
        """Drop references to all that was prepared."""

    # --- gradients -----------------------------------------------------------------------------------------------

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context manager in which ``backward`` through ``model`` leaves gradients unreduced.

        Strategies whose ``backward`` reduces gradients override this.
        """
        return nullcontext()

    def sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context manager in which ``backward`` reduces gradients even if the forwards ran under ``no_sync``.

        If another strategy has set up ``model``, this does nothing.
        """
        return nullcontext()

    def backward(
        self, loss: torch.Tensor, divisor: int, precision: Precision, options: dict[str, Any]
    ) -> None:
        """Call ``loss.backward(**options)``, with the loss divided, and scaled where ``precision`` needs it.

        Args:
            loss: a tensor of one element.
            divisor: micro-steps of the accumulation window.
            precision: scales losses and gradients.
            options: the keyword arguments of ``Accelerator.backward``.
        """
        precision.backward(loss / divisor if divisor > 1 else loss, options)

    def clip_grad_norm(
        self, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip gradients by their total norm over all shards of all parameters; return the norm before."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value(self, parameters: Sequence[torch.Tensor], clip_value: float) -> None:
        """Clip gradients elementwise to [-clip_value, clip_value]."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def join_uneven_inputs(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a context manager in which ranks without data left take part in the steps of the others.

        It gives an object whose ``is_last`` says, once the block has ended on all ranks, whether this rank took all
        steps; None if no rank takes part without data.
        """
        if self.unjoined:
            warn(
                f"join_uneven_inputs has no effect {self.unjoined}: all ranks take part in every step; keep "
                "even_batches=True"
            )
        return nullcontext()

    # --- states; where the strategy holds shards, every rank calls these -----------------------------------------

    def state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """Return the full weights of a user's own module.

        If the strategy holds shards, the main process of every machine gets the weights, in CPU memory; other ranks
        get nothing.
        """
        return module.state_dict()

    def optimizer_state_dict(self, optimizer: Any) -> dict[str, Any]:
        """Return the full state of a prepared optimizer, as torch's do. For shards, see :meth:`state_dict`."""
        return dict(optimizer.state_dict())

    def load_optimizer_state_dict(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Load a full state that :meth:`optimizer_state_dict` returned."""
        optimizer.load_state_dict(state)

    def save_shards(self, folder: Path, models: Sequence[torch.nn.Module], optimizers: Sequence[Any]) -> bool:
        """Write this rank's shards of all models and optimizers to ``folder``; False: save full states."""
        return False

    def shard_writer(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[Any], copy: Callable[[Any], Any]
    ) -> ShardWriter | None:
        """Return a writer for this rank's shards as they are now; None: :meth:`save_shards` writes them.

        Args:
            models: prepared.
            optimizers: prepared.
            copy: returns a nested state in memory that training does not write to.
        """
        return None

    def load_shards(self, folder: Path, models: Sequence[torch.nn.Module], optimizers: Sequence[Any]) -> bool:
        """Load what :meth:`save_shards` wrote on any number of ranks; False: ``folder`` has full states."""
        return False


def report_shards(name: str, model_bytes: int, own_bytes: int, rest: str) -> None:
    """Report how much of a sharded model every rank holds, in one line. All ranks call it.

    Args:
        name: name of the model's class.
        model_bytes: size of all sharded weights.
        own_bytes: size of this rank's shards.
        rest: end of the line, with anything else of interest.
    """
    sizes = operations.gather_object([own_bytes])
    if operations.rank() == 0:
        weights, each = formatting.size(model_bytes), formatting.size_range(sizes)
        text = f"{name}: {weights} of weights sharded over {len(sizes)} ranks, {each} each{rest}"
        context.current().emit(Note.of_job(text))
