"""The implementation of ``prepare``: first loaders and models, then optimizers, then schedulers.

:class:`Preparer` also keeps the prepared objects. Other modules handle precision, data and distribution.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from nblaunch import early_imports, formatting
from nblaunch.training import models, precision
from nblaunch.training.accumulation import AccumulationState
from nblaunch.training.data.loader import PreparedLoader
from nblaunch.training.data.prepare import LoaderTarget, shard_loader
from nblaunch.training.joining import current_topology
from nblaunch.training.models import Replacements, stays_in_place, to_device
from nblaunch.training.optimizer import (
    AcceleratedOptimizer,
    AcceleratedScheduler,
    OptimizerPlaceholder,
    SchedulerPlaceholder,
)
from nblaunch.training.options import DataLoaderConfiguration, TorchDynamoPlugin
from nblaunch.training.precision import Precision
from nblaunch.training.shared_state import SharedState
from nblaunch.training.state import AcceleratorState, GradientState
from nblaunch.training.strategies import Strategy
from nblaunch.weights import give_own_memory

# DDP's constructor and an optimizer's first step import torch's compiler; sympy accounts for a quarter of the import
# time.
early_imports.plan(*early_imports.COMPILER)

P = TypeVar("P")

OPTIMIZERS = (torch.optim.Optimizer, OptimizerPlaceholder)
SCHEDULERS = (LRScheduler, SchedulerPlaceholder, AcceleratedScheduler)


@dataclass(eq=False, repr=False)
class Preparer:
    """Prepares objects with an Accelerator's settings, which users can change, and keeps the results."""

    shared: SharedState
    precision: Precision
    strategy: Strategy
    accumulation: AccumulationState
    dataloader_config: DataLoaderConfiguration
    rng_types: Sequence[str]
    device_placement: bool
    step_scheduler_with_optimizer: bool
    dynamo: TorchDynamoPlugin
    models: list[torch.nn.Module] = field(default_factory=list)
    optimizers: list[AcceleratedOptimizer] = field(default_factory=list)
    schedulers: list[AcceleratedScheduler] = field(default_factory=list)
    loaders: list[PreparedLoader] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._replacements = Replacements()

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.shared.models.update(self.models)  # the unpickled models count as prepared in this process

    @property
    def has_prepared(self) -> bool:
        """Whether there are prepared objects."""
        return any((self.models, self.optimizers, self.schedulers, self.loaders))

    def prepare(self, objects: Sequence[Any], placements: Sequence[bool | None] | None) -> list[Any]:
        """Return prepared objects in the order of ``objects``; see ``Accelerator.prepare``."""
        placements = [None] * len(objects) if placements is None else list(placements)
        if len(placements) != len(objects):
            raise ValueError(
                f"device_placement has {len(placements)} items, but prepare was given {len(objects)} objects"
            )
        # Models come before optimizers, because a strategy may rebuild optimizers for them. Schedulers depend on
        # optimizers.
        stages: tuple[dict[Any, Callable[[Any, bool | None], Any]], ...] = (
            {DataLoader: self.prepare_loader, torch.nn.Module: self.prepare_model},
            {OPTIMIZERS: self.prepare_optimizer},
            {SCHEDULERS: lambda scheduler, placement: self.prepare_scheduler(scheduler)},
        )
        _check_no_device_loader(objects)
        self.strategy.on_prepare(objects)
        prepared = list(objects)
        for stage in stages:
            for position, (obj, placement) in enumerate(zip(objects, placements, strict=True)):
                method = next((method for kind, method in stage.items() if isinstance(obj, kind)), None)
                if method is not None:
                    prepared[position] = method(obj, placement)
        return prepared

    def _is_moved(self, placement: bool | None) -> bool:
        return self.device_placement if placement is None else placement

    def prepare_model(
        self, model: torch.nn.Module, placement: bool | None = None, evaluation_mode: bool = False
    ) -> torch.nn.Module:
        """Move ``model`` to the device, set its precision, and let the strategy set it up unless it is only evaluated.

        The user's module is moved in place and gets the trained weights. The returned model may be a wrapper around it.
        """
        if any(model is other for other in self.models):
            return model
        inner = models.without_parallel_wrappers(model)
        self._check_new(inner)
        moves = self._is_moved(placement) and not stays_in_place(inner, self.shared.process)
        give_own_memory(inner)
        with self._replacing(inner):
            self.precision.convert_layers(inner, self.strategy.holds_shards)
        if self.strategy.casts_models and not evaluation_mode:
            precision.restore_forward(inner)
        else:
            self.precision.prepare_forward(inner)
        prepared: Any = model
        with self._replacing(inner):
            if moves:
                place = to_device if evaluation_mode else self.strategy.place
                place(inner, self.shared.process)
            if not evaluation_mode:
                prepared = self.strategy.setup_module(model, self.shared.process)
        compiled = self.strategy.compile(prepared, self.dynamo)
        prepared = models.compile_model(prepared, self.dynamo) if compiled is None else compiled
        prepared._is_accelerate_prepared = True
        self.models.append(prepared)
        self.shared.models.add(prepared)
        return prepared

    @contextmanager
    def _replacing(self, inner: torch.nn.Module) -> Iterator[None]:
        """Record which parameters of ``inner`` the block replaces, and give the new ones to prepared optimizers.

        Optimizers that are prepared later get them in :meth:`prepare_optimizer`.
        """
        with self._replacements.noted(inner):
            yield
        for optimizer in self.optimizers:
            self._replacements.hand_to(optimizer.optimizer)

    def _check_new(self, inner: torch.nn.Module) -> None:
        for position, prepared in enumerate(self.models):
            if models.bare_module(prepared) is models.bare_module(inner):
                raise ValueError(
                    f"this {type(inner).__name__} was prepared before, as model {position} of this Accelerator; "
                    "use the object that prepare returned then, or call free_memory() first"
                )

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer | OptimizerPlaceholder, placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Return a prepared optimizer, which steps when the accumulation window ends."""
        if not isinstance(optimizer, AcceleratedOptimizer):
            optimizer = self.strategy.optimizer(optimizer) or self._wrap_optimizer(optimizer, placement)
            optimizer.gradient_state = GradientState._of(self.accumulation)
            optimizer.accelerator_state = AcceleratorState()
        return _kept(optimizer, self.optimizers, "optimizer")

    def _wrap_optimizer(self, optimizer: Any, placement: bool | None) -> AcceleratedOptimizer:
        _check_real(optimizer, OptimizerPlaceholder)
        self._replacements.hand_to(optimizer)
        return AcceleratedOptimizer(
            optimizer,
            self.accumulation,
            self.precision,
            self.shared.process.backend,
            self._is_moved(placement),
        )

    def prepare_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        """Return a prepared scheduler. It steps with its optimizer or, if that optimizer is not prepared, with all
        prepared optimizers.
        """
        if not isinstance(scheduler, AcceleratedScheduler):
            scheduler = self.strategy.scheduler(scheduler) or self._wrap_scheduler(scheduler)
            scheduler.gradient_state = GradientState._of(self.accumulation)
        return _kept(scheduler, self.schedulers, "scheduler")

    def _wrap_scheduler(self, scheduler: Any) -> AcceleratedScheduler:
        _check_real(scheduler, SchedulerPlaceholder)
        optimizers = [
            optimizer
            for optimizer in self.optimizers
            if getattr(scheduler, "optimizer", None) in (optimizer, optimizer.optimizer)
        ]
        num_ranks = self.shared.num_data_ranks
        return AcceleratedScheduler(
            scheduler,
            optimizers or self.optimizers,
            self.accumulation,
            num_ranks,
            self.step_scheduler_with_optimizer,
            self.dataloader_config.split_batches,
        )

    def prepare_loader(
        self, loader: DataLoader, placement: bool | None = None, slice_fn: Callable[..., Any] | None = None
    ) -> PreparedLoader:
        """Return a prepared loader for this rank's part of the data."""
        if not isinstance(loader, PreparedLoader):
            process = self.shared.process
            target = LoaderTarget(
                rank=self.shared.data_rank,
                world_size=self.shared.num_data_ranks,
                device=process.device if self._is_moved(placement) else None,
                rng_types=self.rng_types,
                slice_fn=slice_fn,
                is_static=process.backend.needs_static_shapes,
            )
            loader = shard_loader(loader, target, self.dataloader_config)
        return _kept(loader, self.loaders, "DataLoader")

    def clear(self) -> None:
        """Forget all prepared objects."""
        for prepared in (self.models, self.optimizers, self.schedulers, self.loaders):
            prepared.clear()
        self.strategy.clear()


def _kept(prepared: P, among: list[P], original: str) -> P:
    """Append ``prepared`` to the list ``among`` if it is not there yet, and return it.

    Raises:
        ValueError: the object was prepared elsewhere, for example a loader that was prepared for the notebook's single
            process. It has the other process's share of the data, accumulation windows and schedule.
    """
    here = current_topology().world_size
    there = vars(prepared).setdefault("_size_of_job", here)
    if there != here:
        raise ValueError(
            f"this {type(prepared).__name__} was prepared for {formatting.count(there, 'process')}, perhaps in the "
            f"notebook, and this job has {formatting.count(here, 'process')}. Call prepare only inside the function, "
            f"and pass it the original {original}"
        )
    if not any(prepared is other for other in among):
        among.append(prepared)
    return prepared


def _check_real(obj: Any, kind: type[OptimizerPlaceholder | SchedulerPlaceholder]) -> None:
    """Raise ValueError for a placeholder that the strategy does not support."""
    if isinstance(obj, kind):
        raise ValueError(f"{type(obj).__name__} is a placeholder for another object; it needs {obj.needs}")


def _check_no_device_loader(objects: Sequence[Any]) -> None:
    """Raise ValueError for torch_xla's loader: it is not a ``DataLoader``, so every rank would read all data."""
    # If its module was not imported, no object can be an instance.
    module = sys.modules.get("torch_xla.distributed.parallel_loader")
    if module is not None and any(isinstance(obj, module.MpDeviceLoader) for obj in objects):
        raise ValueError(
            "prepare can't divide the data of torch_xla's MpDeviceLoader among ranks. Pass the DataLoader that it "
            "wraps instead; the prepared loader also moves batches to the device"
        )


def extract_model_from_parallel(
    model: Any, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True, recursive: bool = False
) -> Any:
    """Return the user's module inside a prepared model; see ``Accelerator.unwrap_model``.

    With ``recursive``, also unwrap submodules, in place. Without ``keep_torch_compile``, the returned module has no
    compiled parts; if the model has compiled parts, the returned module is a copy with the same tensors.
    """
    nested = list(models.wrappers_and_module(model))
    module, compiled = nested[-1], next(filter(models.is_compiled_module, nested), None)
    if recursive:
        for name, child in list(module.named_children()):
            setattr(module, name, extract_model_from_parallel(child, True, True, recursive=True))
    if not keep_fp32_wrapper:
        for part in nested:
            precision.restore_forward(part)
    if not keep_torch_compile:
        return models.plain_module(module)
    return models.compiled_like(compiled, module) if compiled is not None else module


def is_peft_model(model: Any) -> bool:
    """Return whether the user's module inside ``model`` is a ``PeftModel``."""
    peft = sys.modules.get("peft")  # if peft was not imported, the model can't be an instance
    return peft is not None and isinstance(
        extract_model_from_parallel(model, keep_torch_compile=False), peft.PeftModel
    )
