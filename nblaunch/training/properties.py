"""Properties of the ``Accelerator`` that scripts read or assign: settings, states and parallelism labels.

An assigned setting applies to objects that are prepared later. Trainers from other libraries read the labels before
they branch, even for forms of parallelism that the job does not use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader

from nblaunch import formatting
from nblaunch.training import arguments, gradients
from nblaunch.training.checkpoints.save_state import Saver
from nblaunch.training.checkpoints.snapshot import CheckpointedObjects
from nblaunch.training.data.loader import PreparedLoader
from nblaunch.training.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from nblaunch.training.options import (
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    ProjectConfiguration,
)
from nblaunch.training.parallelism import ParallelismConfig
from nblaunch.training.per_process import PerProcessParts, part
from nblaunch.training.precision import AORecipeKwargs, ReplacedFp16Precision
from nblaunch.training.prepare import Preparer
from nblaunch.training.process_methods import ProcessMethods
from nblaunch.training.shared_state import SharedState
from nblaunch.training.state import AcceleratorState, DistributedType, GradientState
from nblaunch.training.strategies.deepspeed.settings import DeepSpeedSettings
from nblaunch.training.trackers import GeneralTracker
from nblaunch.training.tracking import TrackerHub

H = TypeVar("H", bound=KwargsHandler)


class _Handler(Generic[H]):
    """An attribute for the handler of one type. The strategy and the precision look it up each time."""

    def __init__(self, kind: type[H]) -> None:
        self._kind = kind

    def __get__(self, accelerator: AcceleratorProperties | None, owner: type) -> H | None:
        return None if accelerator is None else accelerator._handlers.get(self._kind)

    def __set__(self, accelerator: AcceleratorProperties, handler: H | None) -> None:
        handlers = accelerator._handlers
        if handler is None:
            handlers.pop(self._kind, None)
        elif isinstance(handler, self._kind):
            handler.check()
            handlers[self._kind] = handler
        else:
            raise TypeError(
                f"{handler!r:.80} is neither {formatting.with_article(self._kind.__name__)} nor None"
            )


class AcceleratorProperties(ProcessMethods, PerProcessParts):
    """Properties that scripts read or assign, and the methods of :class:`ProcessMethods`.

    The subclass's constructor creates the parts that are declared here.
    """

    _handlers: dict[type, Any] = part()
    _shared: SharedState = part()
    _preparer: Preparer = part()
    _checkpoints: CheckpointedObjects = part()
    _saver: Saver = part()
    _trackers: TrackerHub = part()
    flag_tensor: torch.Tensor | None = part()

    # --- state ------------------------------------------------------------------------------------------------------

    @property
    def distributed_type(self) -> DistributedType:
        """A one-word description of the job for users; nblaunch itself does not branch on it."""
        return self.state.distributed_type

    @property
    def state(self) -> AcceleratorState:
        """The settings that this process's Accelerators share, as an ``AcceleratorState``."""
        self._parts()  # in a worker, this may be the first use
        return AcceleratorState.__new__(AcceleratorState)  # skips the constructor's check for an Accelerator

    @property
    def gradient_state(self) -> GradientState:
        """Gradient accumulation and the loader being read, as a ``GradientState``."""
        return GradientState._of(self._preparer.accumulation)

    # --- kwargs_handlers ---------------------------------------------------------------------------------------------

    ddp_handler = _Handler(DistributedDataParallelKwargs)
    """The ``DistributedDataParallelKwargs`` from ``kwargs_handlers``; settable, for models prepared later."""

    autocast_handler = _Handler(AutocastKwargs)
    """The ``AutocastKwargs`` from ``kwargs_handlers``; settable."""

    profile_handler = _Handler(ProfileKwargs)
    """The ``ProfileKwargs`` from ``kwargs_handlers``, for ``profile``; settable."""

    scaler_handler = _Handler(GradScalerKwargs)
    """The ``GradScalerKwargs`` from ``kwargs_handlers`` that fp16's scaler was created with."""

    init_handler = _Handler(InitProcessGroupKwargs)
    """The ``InitProcessGroupKwargs`` from ``kwargs_handlers`` that the process joined its group with."""

    # --- prepared objects --------------------------------------------------------------------------------------------

    @property
    def _models(self) -> list[torch.nn.Module]:
        return self._preparer.models

    @property
    def _optimizers(self) -> list[AcceleratedOptimizer]:
        return self._preparer.optimizers

    @property
    def _schedulers(self) -> list[AcceleratedScheduler]:
        return self._preparer.schedulers

    @property
    def _dataloaders(self) -> list[PreparedLoader]:
        return self._preparer.loaders

    # --- precision ---------------------------------------------------------------------------------------------------

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"fp16"``, ``"bf16"`` or ``"fp8"``."""
        return self._preparer.precision.name

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler for fp16; None in other precisions."""
        return self._preparer.precision.scaler

    @property
    def native_amp(self) -> bool:
        """Whether forward passes compute in half precision."""
        precision = self._preparer.precision
        return precision.name != "no" and not isinstance(precision, ReplacedFp16Precision)

    # --- settings of loaders, placement and schedulers ---------------------------------------------------------------

    @property
    def dataloader_config(self) -> DataLoaderConfiguration:
        """The settings with which prepared loaders share their data among ranks; settable."""
        return self._preparer.dataloader_config

    @dataloader_config.setter
    def dataloader_config(self, config: DataLoaderConfiguration) -> None:
        self._preparer.dataloader_config = config

    @property
    def rng_types(self) -> Sequence[str]:
        """Generators that loaders synchronise across ranks at the start of every epoch; settable."""
        return self._preparer.rng_types

    @rng_types.setter
    def rng_types(self, rng_types: Sequence[str] | None) -> None:
        self._preparer.rng_types = arguments.resolve_rng_types(rng_types)

    @property
    def device_placement(self) -> bool:
        """Whether models and batches go to the device of this process; settable."""
        return self._preparer.device_placement

    @device_placement.setter
    def device_placement(self, device_placement: bool) -> None:
        self._preparer.device_placement = device_placement

    @property
    def step_scheduler_with_optimizer(self) -> bool:
        """Whether schedulers step with their optimizer, once per process; settable."""
        return self._preparer.step_scheduler_with_optimizer

    @step_scheduler_with_optimizer.setter
    def step_scheduler_with_optimizer(self, is_wanted: bool) -> None:
        self._preparer.step_scheduler_with_optimizer = is_wanted

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is the size of the global batch."""
        return self.dataloader_config.split_batches

    @property
    def dispatch_batches(self) -> bool | None:
        """Whether rank 0 reads for all ranks; None: it does for iterable datasets."""
        return self.dataloader_config.dispatch_batches

    @property
    def even_batches(self) -> bool:
        """Whether loaders pad the end of an epoch to give all ranks the same number of batches; settable."""
        return self.dataloader_config.even_batches

    @even_batches.setter
    def even_batches(self, even_batches: bool) -> None:
        self.dataloader_config = dataclasses.replace(self.dataloader_config, even_batches=even_batches)

    @property
    def use_seedable_sampler(self) -> bool:
        """Whether random orders depend only on the seed and the epoch."""
        return self.dataloader_config.use_seedable_sampler

    @property
    def use_stateful_dataloader(self) -> bool:
        """Whether loaders know their position in an epoch."""
        return self.dataloader_config.use_stateful_dataloader

    @property
    def non_blocking(self) -> bool:
        """Whether batches are copied to the device asynchronously."""
        return self.dataloader_config.non_blocking

    # --- gradient accumulation ---------------------------------------------------------------------------------------

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-step ends in an optimizer step; settable."""
        return self._preparer.accumulation.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._preparer.accumulation.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Number of micro-steps per optimizer step; settable, for later windows."""
        return self._preparer.accumulation.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, num_steps: int) -> None:
        self._preparer.accumulation.num_steps = num_steps

    @property
    def step(self) -> int:
        """Number of micro-steps since a loader last ended and closed a window; settable."""
        return self._preparer.accumulation.step

    @step.setter
    def step(self, step: int) -> None:
        self._preparer.accumulation.step = step

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether any optimizer skipped its last step because fp16 gradients overflowed.

        Check it before code that must follow an actual step, such as code that averages weights::

            optimizer.step()
            if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
                average.update_parameters(model)  # torch.optim.swa_utils.AveragedModel

        In the middle of an accumulation window, it describes the step before the window.
        """
        return any(optimizer.step_was_skipped for optimizer in self._preparer.optimizers)

    # --- checkpoints and trackers ------------------------------------------------------------------------------------

    @property
    def project_configuration(self) -> ProjectConfiguration:
        """The folders for checkpoints and logs."""
        return self._checkpoints.project

    @property
    def project_dir(self) -> str | None:
        """The folder for this training run; None if none was set."""
        return self._checkpoints.project.project_dir

    @property
    def logging_dir(self) -> str | None:
        """The folder for trackers that write files; None if none was set."""
        return self._checkpoints.project.logging_dir

    @property
    def save_iteration(self) -> int:
        """Number of the next automatically named checkpoint."""
        return self._checkpoints.project.iteration

    @property
    def trackers(self) -> list[GeneralTracker]:
        """The trackers that are running in this process, after :meth:`init_trackers`."""
        return self._trackers.trackers

    @property
    def log_with(self) -> list[Any]:
        """The tracker classes and trackers that the argument ``log_with`` selected."""
        return self._trackers.chosen

    # --- labels of parallelism ---------------------------------------------------------------------------------------

    @property
    def parallelism_config(self) -> ParallelismConfig | None:
        """How the ranks are divided for parallel training; None: all ranks are replicas."""
        return self._preparer.shared.parallelism

    @property
    def torch_device_mesh(self) -> Any:
        """The ranks as torch's ``DeviceMesh`` with named dimensions; None without a ``parallelism_config``."""
        config = self.parallelism_config
        return None if config is None else config.device_mesh

    def _coordinate(self, name: str) -> int:
        config = self.parallelism_config
        return 0 if config is None else config.coordinate(name)

    @property
    def multi_device(self) -> bool:
        """Whether several processes compute on devices other than the CPU."""
        return self._process.topology.world_size > 1 and self._process.device.type != "cpu"

    @property
    def data_parallel_rank(self) -> int:
        """Index of this process's replica; without a ``parallelism_config``, the rank."""
        return (
            self._process.topology.rank
            if self.parallelism_config is None
            else self._coordinate("dp_replicate")
        )

    @property
    def data_parallel_shard_rank(self) -> int:
        """Index of this process's shard within its replica of the model."""
        return self._coordinate("dp_shard")

    @property
    def tensor_parallel_rank(self) -> int:
        """Index of this process's part of every layer."""
        return self._coordinate("tp")

    @property
    def context_parallel_rank(self) -> int:
        """Index of this process's part of every sequence."""
        return self._coordinate("cp")

    def deepspeed_ulysses_dl_adapter(self, dl: DataLoader, model: torch.nn.Module) -> DataLoader:
        """Return the loader unchanged: every rank reads whole sequences, because ``sp_size`` is always 1."""
        return dl

    pipeline_parallel_rank = 0
    """Always 0, because every rank has all layers."""

    @property
    def is_composable_parallelism_enabled(self) -> bool:
        """Whether sharding can be combined with other forms of parallelism."""
        return self.is_fsdp2

    @property
    def is_fsdp2(self) -> bool:
        """Whether models are sharded over ranks."""
        return self._preparer.strategy.label == "FSDP"

    should_save_model = True
    """Always True, because every process takes part in saving the model."""

    @property
    def deepspeed_plugin(self) -> DeepSpeedSettings | None:
        """The selected DeepSpeed plugin; None without DeepSpeed."""
        return self.state.deepspeed_plugin

    @property
    def ao_recipe_handler(self) -> AORecipeKwargs | None:
        """torchao's recipe for fp8; None in other precisions."""
        return getattr(self._preparer.precision, "recipe", None)

    @property
    def fp8_enabled(self) -> bool:
        """Whether models train in fp8."""
        return self._preparer.precision.name == "fp8"

    @property
    def has_fp8_handler(self) -> bool:
        """Whether there is a recipe for fp8."""
        return self.ao_recipe_handler is not None

    @property
    def fp8_backend(self) -> str | None:
        """``"AO"`` if torchao trains models in fp8; None otherwise."""
        return "AO" if self.fp8_enabled else None

    fp8_recipe_handler = te_recipe_handler = msamp_recipe_handler = None
    """Recipes for other libraries: always None, as in Accelerate without such a recipe."""

    delayed_fp8_autocast = False
    """Always False, because the setting belongs to another library."""

    @property
    def has_lomo_optimizer(self) -> bool:
        """Whether a prepared optimizer steps during backward; see ``lomo_backward``."""
        return any(optimizer.steps_in_backward for optimizer in self._optimizers)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Compute gradients and step with prepared optimizers from ``lomo_optim``, which do both in one call.

        Args:
            loss: a tensor with one element.
            learning_rate: the learning rate of this step.

        Raises:
            ValueError: no such optimizer was prepared, or the learning rate is None.
        """
        gradients.lomo_backward(self._preparer, loss, learning_rate)
