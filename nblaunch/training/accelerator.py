"""The :class:`Accelerator`: what a person's training function calls.

A façade. It resolves settings once, when it is built, and hands every call to the part that knows: ``process.py``
(ranks, barriers), ``prepare.py``, ``precision.py``, ``accumulation.py``, ``collectives.py``, ``strategies/``. It never
asks which device or strategy is in use.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from nblaunch import context, env
from nblaunch.events import WorkerState
from nblaunch.training import advice, collectives, nested, precision, strategies
from nblaunch.training.loader import DataLoaderShard
from nblaunch.training.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from nblaunch.training.options import (
    RNG_TYPES,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    check_choice,
)
from nblaunch.training.prepare import Preparer
from nblaunch.training.process import Member, ProcessControl
from nblaunch.training.state import (
    AcceleratorState,
    DistributedType,
    GradientState,
    Session,
    open_session,
)

T = TypeVar("T")

_LOSS_INTERVAL_S = 0.5
_HANDLERS = (DistributedDataParallelKwargs, GradScalerKwargs, AutocastKwargs, InitProcessGroupKwargs)

# Arguments of the reference's Accelerator that are not supported yet, with what to do instead.
_REFUSED_ARGUMENTS = {
    "deepspeed_plugin": "models are spread with DistributedDataParallel",
    "deepspeed_plugins": "models are spread with DistributedDataParallel",
    "fsdp_plugin": "models are spread with DistributedDataParallel",
    "megatron_lm_plugin": "models are spread with DistributedDataParallel",
    "parallelism_config": "models are spread with DistributedDataParallel",
    "log_with": "log from the main process: `if accelerator.is_main_process: ...`",
    "project_dir": "save from the main process with torch.save",
    "project_config": "save from the main process with torch.save",
    "dynamo_backend": "call torch.compile on the model before prepare",
    "dynamo_plugin": "call torch.compile on the model before prepare",
}

# Members of the reference's Accelerator that are not offered yet.
_REFUSED_MEMBERS = {
    "save": "torch.save on the main process",
    "save_model": "torch.save(accelerator.unwrap_model(model).state_dict(), path) on the main process",
    "save_state": "torch.save of the state_dicts on the main process",
    "load_state": "load_state_dict before prepare",
    "register_for_checkpointing": "torch.save of the state_dicts on the main process",
    "get_state_dict": "accelerator.unwrap_model(model).state_dict()",
    "init_trackers": "a tracker of your own on the main process",
    "get_tracker": "a tracker of your own on the main process",
    "log": "a tracker of your own on the main process",
    "profile": "torch.profiler.profile",
    "skip_first_batches": "itertools.islice on the loader",
    "join_uneven_inputs": "DataLoaderConfiguration(even_batches=True), the default",
    "trigger_sync_in_backward": "accumulate or no_sync",
    "set_trigger": "accelerator.reduce of a flag tensor",
    "check_trigger": "accelerator.reduce of a flag tensor",
}


class Accelerator(ProcessControl):
    """Prepares a plain PyTorch training loop for any number of processes, and helps it to act as one.

    Args:
        device_placement: move models and batches to this process's device.
        split_batches: a loader's ``batch_size`` is that of all ranks together. None: as ``dataloader_config`` says.
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"``. None: what ``notebook_launcher`` was given, else the
            variable ``ACCELERATE_MIXED_PRECISION``, else ``"no"``.
        gradient_accumulation_steps: micro-steps per optimizer step, see :meth:`accumulate`.
        cpu: compute on the CPU even where there are other devices.
        dataloader_config: how prepared loaders share their data among ranks.
        rng_types: generators that are made equal over ranks at the start of every epoch: ``"generator"`` (the loader's
            own, the default), ``"torch"``, ``"cuda"``.
        gradient_accumulation_plugin: gradient accumulation in full, instead of ``gradient_accumulation_steps``.
        step_scheduler_with_optimizer: schedulers step where their optimizer does, and once per process, because
            schedules are written for a single one. False: exactly once per call.
        kwargs_handlers: at most one each of ``DistributedDataParallelKwargs``, ``GradScalerKwargs``,
            ``AutocastKwargs``, ``InitProcessGroupKwargs``.

    Raises:
        ValueError: an argument has an invalid value, contradicts another one, or asks for another precision or device
            than an earlier Accelerator of this process.
        TypeError: an unknown argument.
        NotImplementedError: an argument that the reference has and that is not supported here yet.
    """

    def __init__(
        self,
        device_placement: bool = True,
        split_batches: bool | None = None,
        mixed_precision: str | None = None,
        gradient_accumulation_steps: int = 1,
        cpu: bool = False,
        dataloader_config: DataLoaderConfiguration | None = None,
        *,
        rng_types: Sequence[str] | None = None,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        step_scheduler_with_optimizer: bool = True,
        kwargs_handlers: Sequence[KwargsHandler] | None = None,
        **unsupported: Any,
    ) -> None:
        _refuse(unsupported)
        handlers = _sort_handlers(kwargs_handlers or ())
        accumulation = _accumulation_settings(gradient_accumulation_steps, gradient_accumulation_plugin)
        self.dataloader_config = _data_settings(split_batches, dataloader_config)
        self.rng_types = ["generator"] if rng_types is None else [str(kind) for kind in rng_types]
        for kind in self.rng_types:
            check_choice("rng_types item", kind, RNG_TYPES)
        self.device_placement = device_placement
        self.step_scheduler_with_optimizer = step_scheduler_with_optimizer

        self._session = open_session(cpu, handlers.get(InitProcessGroupKwargs))
        self._precision = _precision_of(self._session, mixed_precision, handlers)
        self._session.gradients.configure(accumulation)
        self._strategy = strategies.choose(self._member, handlers.get(DistributedDataParallelKwargs))
        self._preparer = Preparer(
            self._session,
            self._precision,
            self._strategy,
            self.dataloader_config,
            self.rng_types,
            device_placement,
            step_scheduler_with_optimizer,
        )
        self._next_loss_s = 0.0

    @property
    def _member(self) -> Member:
        return self._session.member

    def __getattr__(self, name: str) -> Any:
        if name in _REFUSED_MEMBERS:
            raise AttributeError(
                f"Accelerator.{name} is not supported by nblaunch yet; use {_REFUSED_MEMBERS[name]}"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Accelerator:
        return self  # one process, one place in the job: trainers that copy their settings go on sharing it

    def __repr__(self) -> str:
        return f"Accelerator(\n{self.state!r})"

    # --- settings and state --------------------------------------------------------------------------------------

    @property
    def mixed_precision(self) -> str:
        """``"no"``, ``"fp16"`` or ``"bf16"``."""
        return self._precision.name

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The gradient scaler of fp16; None otherwise."""
        return self._precision.scaler

    @property
    def distributed_type(self) -> DistributedType:
        """A label for people."""
        return self.state.distributed_type

    @property
    def state(self) -> AcceleratorState:
        """What this process decided, as an ``AcceleratorState``."""
        return AcceleratorState()

    @property
    def gradient_state(self) -> GradientState:
        """Gradient accumulation and the loader being read, as a ``GradientState``."""
        return GradientState()

    @property
    def split_batches(self) -> bool:
        """Whether a loader's batch size is that of all ranks together."""
        return self.dataloader_config.split_batches

    @property
    def even_batches(self) -> bool:
        """Whether the tail of an epoch is completed so that all ranks get equally many batches."""
        return self.dataloader_config.even_batches

    @property
    def sync_gradients(self) -> bool:
        """Whether the current micro-step ends in an optimizer step."""
        return self._session.gradients.sync_gradients

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._session.gradients.sync_gradients = value

    @property
    def gradient_accumulation_steps(self) -> int:
        """Micro-steps per optimizer step."""
        return self._session.gradients.num_steps

    @gradient_accumulation_steps.setter
    def gradient_accumulation_steps(self, num_steps: int) -> None:
        self._session.gradients.set_num_steps(num_steps)

    @property
    def step(self) -> int:
        """Micro-steps in the current accumulation window."""
        return self._session.gradients.step

    @step.setter
    def step(self, step: int) -> None:
        self._session.gradients.step = step

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Whether any optimizer left out its last step because fp16 gradients overflowed."""
        return any(optimizer.step_was_skipped for optimizer in self._optimizers)

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
    def _dataloaders(self) -> list[DataLoaderShard]:
        return self._preparer.loaders

    # --- preparing -----------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Make models, optimizers, loaders and schedulers ready for this job.

        Args:
            *args: the objects, in any order. Those of other kinds, and None, come back as they are.
            device_placement: for each of them, whether it goes to the device; None: as the Accelerator was told.

        Returns:
            The prepared object, or several as a tuple in the order in which they were given. What is prepared already
            comes back as the very same object.

        Raises:
            ValueError: ``device_placement`` is not as long as ``args``.
        """
        placements = [None] * len(args) if device_placement is None else list(device_placement)
        if len(placements) != len(args):
            raise ValueError(
                f"device_placement has {len(placements)} items, but prepare was given {len(args)} objects"
            )
        prepared = self._preparer.prepare(args, placements)
        return prepared[0] if len(prepared) == 1 else tuple(prepared)

    def prepare_model(
        self, model: torch.nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Prepare one model. It is moved in place. ``evaluation_mode``: it is not trained, so not spread over ranks."""
        return self._preparer.model(model, device_placement, evaluation_mode)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Prepare one optimizer."""
        return self._preparer.optimizer(optimizer, device_placement)

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Prepare one learning rate scheduler, after its optimizer."""
        return self._preparer.scheduler(scheduler)

    def prepare_data_loader(
        self, data_loader: DataLoader, device_placement: bool | None = None
    ) -> DataLoaderShard:
        """Prepare one data loader: this rank's share of it."""
        return self._preparer.loader(data_loader, device_placement)

    def unwrap_model(
        self, model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """The user's own module inside a prepared model.

        Args:
            model: what ``prepare`` returned.
            keep_fp32_wrapper: False: also give the module its original ``forward`` back, without mixed precision.
            keep_torch_compile: False: also take a compiled module out of its compiled wrapper. A wrapper that was
                compiled together with its module comes off in any case.
        """
        module = strategies.unwrap(model)
        inner = strategies.unwrap(getattr(module, "_orig_mod", module))
        if not keep_fp32_wrapper:
            precision.restore_forward(module)
            precision.restore_forward(inner)
        is_compiled_module = getattr(module, "_orig_mod", None) is inner
        return module if keep_torch_compile and is_compiled_module else inner

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget what was prepared and give memory back.

        Returns:
            One None per argument, to drop the caller's references: ``model, opt = accelerator.clear(model, opt)``.
        """
        self._preparer.clear()
        self.step = 0
        count = len(objects)
        del objects
        gc.collect()
        self._member.backend.empty_cache()
        return [None] * count

    def clear(self, *objects: Any) -> list[None]:
        """Another name of :meth:`free_memory`."""
        return self.free_memory(*objects)

    # --- one training step ---------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """``loss.backward(**kwargs)``, with the loss divided by the micro-steps of a window, and scaled for fp16.

        The value is shown on the dashboard, at most twice a second: reading it makes the process wait for the device.
        """
        num_steps = self._session.gradients.num_steps
        self._precision.backward(loss / num_steps if num_steps > 1 else loss, **kwargs)
        now = time.monotonic()
        if now >= self._next_loss_s and loss.numel() == 1:
            self._next_loss_s = now + _LOSS_INTERVAL_S
            self._member.slot.set_loss(float(loss.detach()))

    @contextmanager
    def accumulate(self, *models: torch.nn.Module) -> Iterator[None]:
        """One micro-step: gradients are reduced and optimizers step only where the window ends.

        A window ends after ``gradient_accumulation_steps`` micro-steps, and at the last batch of a prepared loader.
        """
        gradients = self._session.gradients
        gradients.advance()
        is_synced = gradients.sync_gradients or gradients.plugin.sync_each_batch
        with ExitStack() as stack:
            for model in () if is_synced else models:
                stack.enter_context(self._strategy.no_sync(model))
            yield

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[Any]:
        """Context manager: ``backward`` leaves gradients unreduced. Does nothing in a lone process."""
        return self._strategy.no_sync(model)

    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
        """Context manager: mixed precision for computations outside of a prepared model, such as a loss."""
        return self._precision.autocast(autocast_handler)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Bring fp16 gradients to their true size: those of ``optimizer``, by default of all prepared ones."""
        for one in self._optimizers if optimizer is None else nested.leaves(optimizer):
            self._precision.unscale(one.optimizer if isinstance(one, AcceleratedOptimizer) else one)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip gradients by their total norm, in true size; returns the norm before. Call where gradients sync."""
        self.unscale_gradients()
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip gradients elementwise to [-clip_value, clip_value], in true size. Call where gradients sync."""
        self.unscale_gradients()
        torch.nn.utils.clip_grad_value_(parameters, clip_value)

    # --- values of all ranks -------------------------------------------------------------------------------------

    def gather(self, tensor: Any) -> Any:
        """Concatenate tensors over ranks, see :func:`nblaunch.training.collectives.gather`."""
        return collectives.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather what ranks computed for their batches, each sample of the dataset exactly once.

        Samples that completed the last batch of an epoch are dropped. All ranks must call it for every batch, with
        whole batches: the first dimension is that of samples.

        Args:
            input_data: tensor or nested structure of tensors; anything else must be an iterable per rank and is
                gathered with pickle, as a list.
            use_gather_object: gather with pickle in any case.
        """
        is_object = use_gather_object or not all(
            isinstance(leaf, torch.Tensor) for leaf in nested.leaves(input_data)
        )
        gathered = collectives.gather_object(input_data) if is_object else collectives.gather(input_data)
        gradients = self._session.gradients
        if not self.use_distributed or not gradients.end_of_dataloader:
            return gathered
        remainder = gradients.remainder
        if remainder < 0 and not _drops_last(gradients.active_loader):
            advice.warn(
                "the loader's length is not known, so samples that completed its last batch are still among the "
                "gathered ones. With num_workers=0 they can be told apart."
            )
        if remainder <= 0:
            return gathered
        if is_object:
            return gathered[:remainder]
        return nested.map_leaves(lambda leaf: leaf[:remainder], gathered)

    def gather_object(self, items: Any) -> Any:
        """All ranks' elements as one list, see :func:`nblaunch.training.collectives.gather_object`."""
        return collectives.gather_object(items)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Combine tensors over ranks, see :func:`nblaunch.training.collectives.reduce`."""
        return collectives.reduce(tensor, reduction, scale)

    def broadcast(self, tensor: Any, from_process: int = 0) -> Any:
        """Overwrite tensors with those of one rank, see :func:`nblaunch.training.collectives.broadcast`."""
        return collectives.broadcast(tensor, from_process)

    def pad_across_processes(
        self, tensor: Any, dim: int = 0, pad_index: float = 0, pad_first: bool = False
    ) -> Any:
        """Pad to the largest size of any rank, see :func:`nblaunch.training.collectives.pad_across_processes`."""
        return collectives.pad_across_processes(tensor, dim, pad_index, pad_first)

    # --- progress and the end ------------------------------------------------------------------------------------

    def progress(
        self, iterable: Iterable[T], total: int | None = None, desc: str | None = None
    ) -> Iterator[T]:
        """``iterable``, with its steps shown on the dashboard. Prepared loaders are shown by themselves.

        Args:
            iterable: anything; a prepared loader is passed through.
            total: its length where ``len`` doesn't tell.
            desc: a word about it, shown as this rank's status line in a launched worker.
        """
        if isinstance(iterable, DataLoaderShard):
            yield from iterable
            return
        if desc is not None and context.current().is_launched:
            print(desc, end="\r", flush=True)
        length = total if total is not None else _length_of(iterable)
        passes = self._session.passes
        one = passes.begin(length, passes.epoch, WorkerState.RUNNING)
        try:
            for item in iterable:
                yield item
                passes.advance(one)
        finally:
            passes.end(one)

    def end_training(self) -> None:
        """Leave the process group. Call it last, on all ranks; nothing can be gathered afterwards."""
        self.destroy_process_group()


def _refuse(unsupported: dict[str, Any]) -> None:
    for name, value in unsupported.items():
        if name not in _REFUSED_ARGUMENTS:
            raise TypeError(f"Accelerator() got an unexpected keyword argument {name!r}")
        if value is not None:  # None is the reference's default, passed on by many trainers
            raise NotImplementedError(
                f"Accelerator({name}={value!r:.80}) is not supported by nblaunch yet; {_REFUSED_ARGUMENTS[name]}"
            )


def _sort_handlers(handlers: Sequence[KwargsHandler]) -> dict[type, Any]:
    by_type: dict[type, Any] = {}
    for handler in handlers:
        if not isinstance(handler, _HANDLERS):
            valid = ", ".join(kind.__name__ for kind in _HANDLERS)
            raise ValueError(f"kwargs_handlers has {handler!r:.80}, which is none of {valid}")
        if type(handler) in by_type:
            raise ValueError(f"kwargs_handlers has more than one {type(handler).__name__}")
        by_type[type(handler)] = handler
    return by_type


def _accumulation_settings(
    num_steps: int, plugin: GradientAccumulationPlugin | None
) -> GradientAccumulationPlugin:
    if plugin is None:
        return GradientAccumulationPlugin(num_steps=num_steps)
    if num_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps={num_steps} and gradient_accumulation_plugin were both given; set "
            "num_steps in the plugin"
        )
    return plugin


def _data_settings(
    split_batches: bool | None, config: DataLoaderConfiguration | None
) -> DataLoaderConfiguration:
    if config is None:
        return DataLoaderConfiguration(split_batches=bool(split_batches))
    if split_batches is not None and split_batches != config.split_batches:
        raise ValueError(
            f"split_batches={split_batches}, but dataloader_config has split_batches={config.split_batches}; "
            "set it in one place"
        )
    return config


def _precision_of(session: Session, asked: str | None, handlers: dict[type, Any]) -> precision.Precision:
    """The precision of this process: the first Accelerator decides, later ones agree or don't care."""
    existing = session.precision
    backend = session.member.backend
    scaling, autocast = handlers.get(GradScalerKwargs), handlers.get(AutocastKwargs)
    if existing is not None and asked is None:
        asked = existing.name
    default = context.current().defaults.get("mixed_precision")
    name = precision.resolve(asked or default or env.read("ACCELERATE_MIXED_PRECISION") or "no", backend)
    if existing is None:
        session.precision = precision.make(name, backend, autocast, scaling)
        return session.precision
    if existing.name != name:
        raise ValueError(
            f"mixed_precision={name!r}, but an earlier Accelerator of this process uses {existing.name!r}. Use one "
            "precision per process, or AcceleratorState._reset_state() in between."
        )
    return precision.make(name, backend, autocast, scaling) if autocast or scaling else existing


def _drops_last(loader: Any) -> bool:
    return bool(loader.drop_last or getattr(loader.batch_sampler, "drop_last", False))


def _length_of(iterable: Any) -> int:
    try:
        return len(iterable)
    except TypeError:
        return -1
