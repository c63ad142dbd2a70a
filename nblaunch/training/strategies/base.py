"""The interface for training on several processes: :class:`Strategy`, and :class:`StrategyPlugin`, which chooses one.

A :class:`TrainingSetup` gives a strategy its Accelerator's ranks, device, precision and accumulation. ``prepare`` calls
the strategy's methods in this order:

    on_prepare         with all arguments of the call
    for each model:
                       (prepare sets the precision of layers and, without ``casts_models``, of the forward pass)
      place            moves the model to its device, unless it must stay where it is
      setup_module     wraps or shards it
      compile
    optimizer          for each optimizer, after all models
    scheduler          for each scheduler, after all optimizers

A strategy does not take part in preparing loaders. To add a strategy, write one file with the plugin and the
strategy, in this folder or in a user's own code.
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
from nblaunch.training.options import GradientAccumulationPlugin, TorchDynamoPlugin, not_nblaunchs
from nblaunch.training.parallelism import ParallelismConfig
from nblaunch.training.precision import Precision


@dataclass(frozen=True)
class TrainingSetup:
    """The parts of an Accelerator that a strategy needs.

    Args:
        process: this process's ranks, backend and device.
        precision: the requested precision; a strategy may adapt it (see :meth:`Strategy.adapt_precision`).
        accumulation: decides when gradients are synchronised and optimizers step.
        splits_batches: whether a loader's batch is the global batch, which the ranks divide among themselves.
        parallelism: how the ranks are divided, including the device mesh; None: the plugin decides, or every rank is a
            replica.
    """

    process: JoinedProcess
    precision: Precision
    accumulation: AccumulationState
    splits_batches: bool = False
    parallelism: ParallelismConfig | None = None


class ShardWriter(ABC):
    """Copies of this rank's shards, to be written while training continues. Every rank calls one of the methods."""

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

    You can add a strategy without changing nblaunch. In any module that the workers can import, write a plugin that
    builds it, and pass an instance::

        class Whole(StrategyPlugin):
            name = "whole"

            def build(self, setup):
                return WholeStrategy()          # a Strategy with setup_module()

        accelerator = Accelerator(strategy=Whole())

    ``Accelerator(fsdp_plugin=...)`` and ``deepspeed_plugin=`` take plugins of this kind as well.
    """

    name: ClassVar[str] = ""
    """Name of the strategy. Checkpoints record it."""

    is_kept: ClassVar[bool] = False
    """Whether later Accelerators in the process also use this plugin if the user passes no other."""

    @classmethod
    def from_argument(cls, argument: str, value: Any) -> StrategyPlugin:
        """Return the plugin for an argument of the Accelerator.

        Args:
            argument: name of the argument, for error messages.
            value: the object that the user passed.

        Raises:
            TypeError: ``value`` is not a plugin of this class.
        """
        if isinstance(value, cls):
            return value
        raise TypeError(f"{argument}={value!r:.80} {not_nblaunchs(value, cls)}")

    def precision_name(self, asked: str | None, backend: Backend) -> str | None:
        """Return the name of the precision that models compute in.

        Args:
            asked: the Accelerator's ``mixed_precision``; None: the user did not set it.
            backend: the device family, which may not support the precision.

        Raises:
            ValueError: the settings contradict ``asked``, or the device does not support the precision.
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
    """A way to train models across several processes. The module's docstring shows the order of the calls."""

    name: str

    label = ""
    """Member of ``DistributedType`` for jobs with this strategy; empty: the devices determine it."""

    steps_by_engine = False
    """Whether another library's engine steps optimizers and clears gradients, and decides when."""

    casts_models = False
    """Whether models that :meth:`setup_module` returns compute in the Accelerator's precision without autocast.

    FSDP2 casts them with torch's ``MixedPrecisionPolicy``.
    """

    holds_shards = False
    """Whether a rank holds only shards of weights or optimizer states. All ranks then take part in saving them."""

    shard_files = ""
    """Pattern for the checkpoint files that only rank ``{rank}`` writes and checksums. Empty: rank 0 checksums all."""

    unjoined = ""
    """The condition under which :meth:`join_uneven_inputs` has no effect, as worded in the warning: ``"with
    DeepSpeed"``.

    Empty: no warning.
    """

    # --- preparing -----------------------------------------------------------------------------------------------

    def adapt_precision(self, precision: Precision) -> Precision:
        """Return the precision to use for models, without the parts that the strategy handles itself."""
        return precision

    def on_prepare(self, objects: Sequence[Any]) -> None:
        """Check and record all arguments of one call to ``prepare`` before it prepares any of them.

        ``prepare_model`` and similar methods prepare a single object, and do not call this.
        """

    def place(self, model: torch.nn.Module, process: JoinedProcess) -> None:
        """Move the user's module to the device of this rank, before :meth:`setup_module`.

        Override this to do nothing if :meth:`setup_module` moves the weights piece by piece. An override must not
        communicate: workers may move their models one after the other, and would then wait for each other forever.

        If ``device_placement=False``, ``prepare`` does not call this; nor does it for a model that a device map or
        quantisation keeps in place. Models that are only evaluated are moved without a call to this method.
        """
        models.to_device(model, process)

    @abstractmethod
    def setup_module(self, model: torch.nn.Module, process: JoinedProcess) -> torch.nn.Module:
        """Return ``model`` ready for training on this rank, wrapped or not, with its trainable weights equal to rank
        0's.

        ``prepare`` calls :meth:`place` first. It calls neither method for models that are only evaluated.
        """

    def compile(self, model: torch.nn.Module, options: TorchDynamoPlugin) -> torch.nn.Module | None:
        """Compile a model in the strategy's own way; return None to have ``prepare`` compile it like any module.

        Args:
            model: the model that :meth:`setup_module` returned; for a model that is only evaluated, the one passed to
                ``prepare``.
            options: the compiler's settings.
        """
        return None

    def optimizer(self, optimizer: Any) -> AcceleratedOptimizer | None:
        """Return the prepared optimizer that replaces ``optimizer``, or None to have ``prepare`` wrap it.

        The models are already prepared. When ``prepare`` wraps an optimizer, :meth:`Replacements.hand_to
        <nblaunch.training.models.Replacements.hand_to>` gives it the parameters that replaced the user's.
        """
        return None

    def scheduler(self, scheduler: Any) -> AcceleratedScheduler | None:
        """Return the prepared scheduler that replaces ``scheduler``, or None to have ``prepare`` wrap it."""
        return None

    def clear(self) -> None:
        """Drop all references to prepared objects."""

    # --- gradients -----------------------------------------------------------------------------------------------

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context manager in which ``backward`` through ``model`` leaves gradients unreduced.

        Strategies whose ``backward`` reduces gradients override this.
        """
        return nullcontext()

    def sync_in_backward(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Return a context in which ``backward`` reduces gradients even if forward passes ran under ``no_sync``.

        The context does nothing if another strategy set up ``model``.
        """
        return nullcontext()

    def backward(
        self, loss: torch.Tensor, divisor: int, precision: Precision, options: dict[str, Any]
    ) -> None:
        """Call ``loss.backward(**options)`` on the divided loss, which ``precision`` scales if necessary.

        Args:
            loss: a tensor with one element.
            divisor: number of micro-steps in the accumulation window.
            precision: scales losses and gradients.
            options: the keyword arguments of ``Accelerator.backward``.
        """
        part = loss / divisor if divisor > 1 else loss
        if precision.scales_gradients:
            precision.backward(part, options)
        elif options:  # call backward directly, not through precision, because this runs in every micro-step
            part.backward(**options)
        else:
            part.backward()

    def clip_grad_norm(
        self, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        """Clip gradients by their total norm over all shards of all parameters; return the norm before clipping."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value(self, parameters: Sequence[torch.Tensor], clip_value: float) -> None:
        """Clip gradients elementwise to [-clip_value, clip_value]."""
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    def join_uneven_inputs(self, joinables: Sequence[Any]) -> AbstractContextManager[Any]:
        """Return a context manager in which ranks that have run out of data join other ranks' steps.

        It yields an object whose attribute ``is_last`` says, once the block has ended on all ranks, whether this rank
        took all steps. It yields None if ranks without data can't join.
        """
        if self.unjoined:
            warn(
                f"join_uneven_inputs has no effect {self.unjoined}, because all ranks take part in every step; "
                "keep even_batches=True"
            )
        return nullcontext()

    # --- states; if the strategy holds shards, every rank calls these methods ------------------------------------

    def state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        """Return the full weights of the user's module.

        If the strategy holds shards, the main process of every machine gets the weights in CPU memory, and other ranks
        get an empty dict.
        """
        return module.state_dict()

    def optimizer_state_dict(self, optimizer: Any) -> dict[str, Any]:
        """Return the full state of a prepared optimizer, in torch's format. For shards, see :meth:`state_dict`."""
        return dict(optimizer.state_dict())

    def load_optimizer_state_dict(self, optimizer: Any, state: dict[str, Any]) -> None:
        """Load a full state that :meth:`optimizer_state_dict` returned."""
        optimizer.load_state_dict(state)

    def save_shards(self, folder: Path, models: Sequence[torch.nn.Module], optimizers: Sequence[Any]) -> bool:
        """Write this rank's shards of all models and optimizers to ``folder``.

        Return False if the caller must save full states instead.
        """
        return False

    def shard_writer(
        self, models: Sequence[torch.nn.Module], optimizers: Sequence[Any], copy: Callable[[Any], Any]
    ) -> ShardWriter | None:
        """Return a writer for the current values of this rank's shards; None if :meth:`save_shards` is needed.

        Args:
            models: the prepared models.
            optimizers: the prepared optimizers.
            copy: copies a nested state into memory that training does not write to.
        """
        return None

    def load_shards(self, folder: Path, models: Sequence[torch.nn.Module], optimizers: Sequence[Any]) -> bool:
        """Load the shards that :meth:`save_shards` wrote on any number of ranks.

        Return False if ``folder`` has full states instead.
        """
        return False


def report_shards(name: str, model_bytes: int, own_bytes: int, rest: str) -> None:
    """Emit a note about how much of a sharded model each rank holds. All ranks call this.

    Args:
        name: name of the model's class.
        model_bytes: size of all sharded weights.
        own_bytes: size of this rank's shards.
        rest: the end of the note, with further information.
    """
    sizes = operations.gather_object([own_bytes])
    if operations.rank() == 0:
        weights, each = formatting.size(model_bytes), formatting.size_range(sizes)
        text = f"{name}: {weights} of weights sharded over {len(sizes)} ranks, {each} each{rest}"
        context.current().emit(Note.of_job(text))
