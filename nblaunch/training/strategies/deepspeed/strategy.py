"""ZeRO: DeepSpeed's engine trains the model, and each rank holds a shard of the training state.

    stage 1: optimizer states   stage 2: also gradients   stage 3: also weights      are sharded

The engine accumulates, clips, scales losses, steps and clears gradients. Users keep their own loops: the strategy
passes each call on to the engine.

In one call, the engine clips, steps, clears gradients and advances its schedule; ``optimizer.step()`` makes that call.
The engine holds gradients in shards, so computing their norm requires a collective. ``clip_grad_norm_`` only sets the
limit, which the engine applies when it steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from nblaunch import context, formatting
from nblaunch.backends.base import Backend
from nblaunch.events import Note
from nblaunch.training.accumulation import AccumulationState
from nblaunch.training.collectives import nested
from nblaunch.training.joining import JoinedProcess, is_distributed, waiting
from nblaunch.training.models import compile_model, without_parallel_wrappers
from nblaunch.training.optimizer import AcceleratedOptimizer, AcceleratedScheduler
from nblaunch.training.options import GradientAccumulationPlugin, TorchDynamoPlugin, not_nblaunchs
from nblaunch.training.precision import AutocastForward, Precision, restore_forward
from nblaunch.training.strategies.base import Strategy, StrategyPlugin, TrainingSetup, report_shards
from nblaunch.training.strategies.deepspeed import checkpoint
from nblaunch.training.strategies.deepspeed import config as deepspeed_config
from nblaunch.training.strategies.deepspeed import library as deepspeed_library
from nblaunch.training.strategies.deepspeed.config import DummyOptim, DummyScheduler, EngineInputs
from nblaunch.training.strategies.deepspeed.settings import DeepSpeedSettings


class DeepSpeedStrategy(Strategy):
    """Trains with one engine per Accelerator, built from the model and the optimizer in one call to ``prepare``.

    A model without an optimizer is only evaluated: stage 3 shards it, while stages 1 and 2 only move it to its device.
    If there are several plugins, the one that is selected when a model is set up configures the model's engine.
    """

    name = "deepspeed"
    label = "DEEPSPEED"
    steps_by_engine = True
    unjoined = "with DeepSpeed"
    holds_shards = True
    shard_files = checkpoint.OWN_FILES

    def __init__(self, plugins: DeepSpeedPlugins, setup: TrainingSetup) -> None:
        deepspeed_library.check_installed()
        reason = setup.process.backend.precision_problem(setup.precision.name)
        if reason is not None:  # the device can't compute in this precision, with or without an engine
            raise ValueError(
                f"mixed_precision={setup.precision.name!r} can't be used with DeepSpeed: {reason}"
            )
        _check_group(setup.process)
        self._plugins = plugins
        self._setup = setup
        self._precision = EnginePrecision(setup.precision)
        self.engine: Any = None
        self._given = EngineInputs()
        self._optimizer: EngineOptimizer | None = None
        self._is_unsynced = self._is_step_due = False

    def adapt_precision(self, precision: Precision) -> Precision:
        return self._precision

    # --- preparing -----------------------------------------------------------------------------------------------

    def on_prepare(self, objects: Sequence[Any]) -> None:
        models = [obj for obj in objects if isinstance(obj, torch.nn.Module)]
        optimizers = [obj for obj in objects if isinstance(obj, (torch.optim.Optimizer, DummyOptim))]
        schedulers = [obj for obj in objects if isinstance(obj, (LRScheduler, DummyScheduler))]
        for kind, passed in (("models", models), ("optimizers", optimizers), ("schedulers", schedulers)):
            if len(passed) > 1:
                raise ValueError(
                    f"prepare was given {len(passed)} {kind}, but a DeepSpeed engine takes only one; call prepare "
                    "once for each model, each with its own Accelerator and plugin: "
                    "Accelerator(deepspeed_plugins={'student': ..., 'teacher': ...})"
                )
        loaders = [obj for obj in objects if isinstance(obj, DataLoader)]
        self._given = EngineInputs(
            optimizer=optimizers[0] if optimizers else None,
            scheduler=schedulers[0] if schedulers else None,
            batch_sizes=[_batch_size(loader) for loader in loaders],
        )

    def place(self, model: torch.nn.Module, process: JoinedProcess) -> None:
        """Move a model that will have no engine. An engine moves its model itself."""
        if not self._needs_engine():
            super().place(model, process)

    def setup_module(self, model: torch.nn.Module, process: JoinedProcess) -> torch.nn.Module:
        if deepspeed_library.is_engine(model) or not self._needs_engine():
            return model
        settings = self._plugins.active
        optimizer = self._given.optimizer
        if optimizer is not None and self.engine is not None:
            trained = type(without_parallel_wrappers(self.engine)).__name__
            raise ValueError(
                f"this Accelerator trains a {trained} with DeepSpeed; create a second Accelerator for the second "
                "model, or call free_memory() first"
            )
        library = deepspeed_library.load(process)
        config = deepspeed_config.complete(settings.deepspeed_config, self._inputs(model, process))
        _gather_as_one(library, model, settings.transformer_moe_cls_names)
        with waiting():  # the engine compares weights across ranks and copies them
            engine, *_ = library.initialize(config=dict(config), model=model, **self._engine_arguments())
        _report(engine, type(model).__name__, process)
        if optimizer is not None:
            self.engine = engine
            self._optimizer = EngineOptimizer(
                engine, self._step, self._setup.accumulation, self._precision, process.backend
            )
        return engine

    def compile(self, model: torch.nn.Module, options: TorchDynamoPlugin) -> torch.nn.Module | None:
        if not deepspeed_library.is_engine(model) or not options.is_on:
            return None
        # Compile the user's module in place: the engine's timers and collectives can't be part of a graph.
        module = without_parallel_wrappers(model)
        if options.use_regional_compilation:
            compile_model(module, options)
        else:
            module.compile(**options.to_compile_kwargs())
        return model

    def _needs_engine(self) -> bool:
        """Return whether a model needs an engine: to train it or, in stage 3, also to evaluate it."""
        return self._given.optimizer is not None or self._plugins.active.zero_stage == 3

    def _inputs(self, model: torch.nn.Module, process: JoinedProcess) -> EngineInputs:
        return dataclasses.replace(
            self._given,
            model=model,
            world_size=process.topology.world_size,
            num_steps=self._setup.accumulation.num_steps,
            splits_batches=self._setup.splits_batches,
            is_train_batch_min=self._plugins.active.is_train_batch_min,
            precision=self._precision.name,
            device_type=process.device.type,
        )

    def _engine_arguments(self) -> dict[str, Any]:
        """Return the engine's optimizer and scheduler arguments."""
        arguments: dict[str, Any] = {}
        optimizer, scheduler = self._given.optimizer, self._given.scheduler
        if isinstance(optimizer, DummyOptim):
            arguments["model_parameters"] = list(optimizer.params)
        elif optimizer is not None:
            arguments["optimizer"] = optimizer
        if isinstance(scheduler, DummyScheduler) and scheduler.lr_scheduler_callable is not None:
            arguments["lr_scheduler"] = scheduler.lr_scheduler_callable
        return arguments

    def optimizer(self, optimizer: Any) -> AcceleratedOptimizer | None:
        if optimizer is not self._given.optimizer or self._optimizer is None:
            raise ValueError(
                f"this {type(optimizer).__name__} was passed to prepare without its model; a DeepSpeed engine "
                "needs both: accelerator.prepare(model, optimizer, ...) in one call"
            )
        return self._optimizer

    def scheduler(self, scheduler: Any) -> AcceleratedScheduler | None:
        if not isinstance(scheduler, DummyScheduler):
            return None
        if self._optimizer is None or self.engine.lr_scheduler is None:
            raise ValueError(
                "this DummyScheduler was passed to prepare without its model and optimizer; call "
                "accelerator.prepare(model, optimizer, scheduler, ...) with all of them"
            )
        return EngineScheduler(self.engine.lr_scheduler, [self._optimizer], self._setup.accumulation)

    def clear(self) -> None:
        if self.engine is not None:
            self.engine.destroy()
        self.engine = self._optimizer = None
        self._is_step_due = False
        self._given = EngineInputs()

    # --- steps ---------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        # Make the engine expect more micro-steps, because its own ``no_sync`` does not support stages 2 and 3.
        before, self._is_unsynced = self._is_unsynced, True
        try:
            yield
        finally:
            self._is_unsynced = before

    def backward(
        self, loss: torch.Tensor, divisor: int, precision: Precision, options: dict[str, Any]
    ) -> None:
        if self.engine is None:
            raise ValueError(
                "backward with DeepSpeed needs a model that was prepared together with its optimizer: "
                "accelerator.prepare(model, optimizer, ...) in one call"
            )
        if self._is_step_due:
            raise ValueError(
                "backward was called twice without optimizer.step() in between, so DeepSpeed's engine would compute "
                "wrong gradients. Add the losses and call backward once; to accumulate gradients, use "
                "accelerator.accumulate(model), or accelerator.no_sync(model) around all but the last call"
            )
        deepspeed_library.quieten()
        self._is_step_due = self._is_boundary
        self.engine.set_gradient_accumulation_boundary(self._is_boundary)
        # As in DeepSpeed, ``scale_wrt_gas=False`` means that the loop has divided the loss itself. Otherwise, divide it
        # here rather than in the engine, because the last window of an epoch may be shorter than the engine's setting.
        part = loss / divisor if options.get("scale_wrt_gas", True) else loss
        self.engine.backward(part, **{**options, "scale_wrt_gas": False})

    @property
    def _is_boundary(self) -> bool:
        return self._setup.accumulation.sync_gradients and not self._is_unsynced

    def _step(self) -> bool:
        """Step the engine; return whether it skipped the step because gradients overflowed."""
        self._is_step_due = False
        self.engine.set_gradient_accumulation_boundary(True)
        self.engine.step()
        _set_max_norm(self.engine, self.engine.gradient_clipping())
        return not self.engine.was_step_applied()

    def clip_grad_norm(
        self, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float
    ) -> torch.Tensor:
        if self.engine is None:
            return super().clip_grad_norm(parameters, max_norm, norm_type)
        _check_clipping(self.engine, parameters, max_norm, norm_type)
        if not self._is_boundary:
            return _last_total_norm(self.engine)
        total = _total_norm(self.engine)
        _set_max_norm(self.engine, max_norm)
        return total

    def clip_grad_value(self, parameters: Sequence[torch.Tensor], clip_value: float) -> None:
        raise ValueError(
            "clip_grad_value_ can't be used with DeepSpeed, whose engine clips by the norm; use clip_grad_norm_"
        )

    # --- states --------------------------------------------------------------------------------------------------

    def state_dict(self, module: torch.nn.Module) -> dict[str, Any]:
        return checkpoint.full_state_dict(module, keep=self._setup.process.topology.local_rank == 0)

    def save_shards(self, folder: Path, models: Sequence[torch.nn.Module], optimizers: Sequence[Any]) -> bool:
        checkpoint.save(folder, models, self._setup.process)
        return True

    def load_shards(self, folder: Path, models: Sequence[torch.nn.Module], optimizers: Sequence[Any]) -> bool:
        checkpoint.load(folder, models, self._setup.process)
        return True


# --- the engine's part of a loop ----------------------------------------------------------------------------------


class EnginePrecision(Precision):
    """Converts inputs and outputs for an engine, which scales losses and keeps fp32 copies of weights itself."""

    def __init__(self, other: Precision) -> None:
        super().__init__(other._backend, {})
        self.name = other.name

    def prepare_forward(self, model: torch.nn.Module) -> None:
        """Make ``model`` accept fp32 batches and return fp32 outputs, as with autocast."""
        restore_forward(model)
        if self.name != "no":
            wrapped = CastForward(model, self)
            model.__dict__.update(_original_forward=wrapped.original, forward=wrapped)


class CastForward(AutocastForward):
    """Calls a model's ``forward`` with floating-point inputs in the dtype of its weights, and returns fp32 outputs.

    An engine's weights are in 16 bits, and most layers do not accept mixed dtypes.
    """

    def __init__(self, model: torch.nn.Module, precision: Precision) -> None:
        super().__init__(model, precision)
        self.parameters = model.parameters

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        dtype = next((p.dtype for p in self.parameters() if p.is_floating_point()), None)
        if dtype in (torch.float16, torch.bfloat16):

            def cast(tensor: torch.Tensor) -> torch.Tensor:
                return tensor.to(dtype) if tensor.is_floating_point() else tensor

            args, kwargs = nested.map_tensors(cast, args), nested.map_tensors(cast, kwargs)
        return nested.convert_to_fp32(self.original(*args, **kwargs))


class EngineOptimizer(AcceleratedOptimizer):
    """A prepared optimizer that an engine steps. Its ``param_groups`` and state cover this rank's shard.

    Args:
        step: steps the engine; returns whether the engine skipped the step because gradients overflowed.
    """

    def __init__(
        self,
        engine: Any,
        step: Callable[[], bool],
        accumulation: AccumulationState,
        precision: Precision,
        backend: Backend,
    ) -> None:
        super().__init__(engine.optimizer, accumulation, precision, backend, place_state=False)
        self.engine = engine
        self._step_engine = step

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Do nothing: the engine clears gradients after it steps."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step the engine; do nothing in the middle of an accumulation window.

        Raises:
            ValueError: a closure was given.
        """
        if closure is not None:
            raise ValueError(
                "DeepSpeed's engine does not support a closure: call optimizer.step() without one"
            )
        if self._accumulation.sync_gradients:
            self._is_overflow = self._step_engine()

    def reduce_gradients(self) -> None:
        """Do nothing: the engine averages gradients in backward."""

    def __repr__(self) -> str:
        return f"EngineOptimizer({self.optimizer!r})"


class EngineScheduler(AcceleratedScheduler):
    """A prepared scheduler that the engine steps with each of its own steps."""

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the engine steps its scheduler."""


# Accelerate's names, which trainers use to recognise objects that an engine steps.
DeepSpeedOptimizerWrapper = EngineOptimizer
DeepSpeedSchedulerWrapper = EngineScheduler


def _check_clipping(
    engine: Any, parameters: Sequence[torch.Tensor], max_norm: float, norm_type: float
) -> None:
    """Raise ValueError if an engine can't clip in the requested way."""
    if norm_type != 2:
        raise ValueError(f"norm_type={norm_type} can't be used with DeepSpeed, which clips by the 2-norm")
    configured = engine.gradient_clipping()
    if configured and configured != max_norm:
        raise ValueError(
            f"clip_grad_norm_(max_norm={max_norm}) contradicts gradient_clipping={configured} in the DeepSpeed "
            'configuration; set it in one place, or write "auto" there'
        )
    trainable = {id(parameter) for parameter in engine.module.parameters() if parameter.requires_grad}
    passed = {id(parameter) for parameter in parameters if parameter.requires_grad}
    if passed != trainable:
        raise ValueError(
            f"clip_grad_norm_ got {len(passed)} trainable parameters, but DeepSpeed clips all {len(trainable)} "
            "parameters of its model together; pass model.parameters()"
        )


def _set_max_norm(engine: Any, max_norm: float) -> None:
    """Make the next step clip to ``max_norm``; 0: do not clip."""
    if hasattr(engine.optimizer, "clip_grad"):
        engine.optimizer.clip_grad = max_norm
    elif max_norm and max_norm != engine.gradient_clipping():  # plain fp32: every rank holds all gradients
        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), max_norm)


def _total_norm(engine: Any) -> torch.Tensor:
    """Return the norm of all unscaled gradients. All ranks must call this between backward and step."""
    optimizer = engine.optimizer
    if hasattr(optimizer, "scaled_global_norm"):  # stages 1 and 2
        norms = [optimizer.scaled_global_norm()]
    elif hasattr(optimizer, "_get_norm_groups"):  # stage 3
        norms = optimizer._get_norm_groups()
    else:
        gradients = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
        if not gradients:
            return _last_total_norm(engine)  # bf16 with fp32 gradients: the step computes the norm
        norms = [torch.linalg.vector_norm(gradient) for gradient in gradients]
    groups = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in norms])
    if bool((groups < 0).any()):  # the engine signals an overflow this way
        return torch.tensor(float("inf"))
    return torch.linalg.vector_norm(groups) / float(getattr(optimizer, "loss_scale", 1.0) or 1.0)


def _last_total_norm(engine: Any) -> torch.Tensor:
    """Return the gradient norm from the last step; 0 if there was no step."""
    return torch.as_tensor(engine.get_global_grad_norm() or 0.0, dtype=torch.float32)


# --- plugins ---------------------------------------------------------------------------------------------------------


class DeepSpeedPlugin(DeepSpeedSettings, StrategyPlugin):
    """The plugin for DeepSpeed, with its settings."""

    __doc__ = DeepSpeedSettings.__doc__  # help() shows the fields

    name = DeepSpeedStrategy.name

    @classmethod
    def from_argument(cls, argument: str, value: Any) -> StrategyPlugin:
        """Return the process's plugins, given a mapping of names to plugins or a single plugin."""
        return DeepSpeedPlugins(dict(value) if isinstance(value, Mapping) else {"default": value})

    def build(self, setup: TrainingSetup) -> Strategy:
        return DeepSpeedPlugins({"default": self}).build(setup)


@dataclass
class DeepSpeedPlugins(StrategyPlugin):
    """A process's DeepSpeed plugins, by name. ``prepare`` uses the selected one."""

    name = DeepSpeedStrategy.name
    is_kept = True

    by_name: dict[str, DeepSpeedSettings]

    def __post_init__(self) -> None:
        if not self.by_name:
            raise ValueError("deepspeed_plugins={} has no plugin")
        for name, plugin in self.by_name.items():
            if not isinstance(plugin, DeepSpeedPlugin):
                raise TypeError(f"the DeepSpeed plugin {name!r} {not_nblaunchs(plugin, DeepSpeedPlugin)}")
        self.select(next(iter(self.by_name)))

    @property
    def active(self) -> DeepSpeedSettings:
        """The selected plugin."""
        return next(plugin for plugin in self.by_name.values() if plugin.selected)

    def get(self, name: str) -> DeepSpeedSettings:
        """Return the plugin ``name``; raise ValueError if it does not exist."""
        if name not in self.by_name:
            raise ValueError(
                f"there is no DeepSpeed plugin {name!r}; valid values are {', '.join(map(repr, self.by_name))}"
            )
        return self.by_name[name]

    def select(self, name: str) -> None:
        """Use the plugin ``name`` from now on."""
        chosen = self.get(name)
        for plugin in self.by_name.values():
            plugin.selected = plugin is chosen

    def precision_name(self, asked: str | None, backend: Backend) -> str | None:
        return self.active.precision_name(asked, backend)

    def accumulation_settings(self, asked: GradientAccumulationPlugin) -> GradientAccumulationPlugin:
        return self.active.accumulation_settings(asked)

    def build(self, setup: TrainingSetup) -> Strategy:
        return DeepSpeedStrategy(self, setup)


def _check_group(process: JoinedProcess) -> None:
    """Reject GPU ranks that communicate over gloo, because with DeepSpeed they would wait for each other forever."""
    size = process.topology.world_size
    if process.device.type != "cpu" and size > 1 and is_distributed() and dist.get_backend() == "gloo":
        raise ValueError(
            f"DeepSpeed needs ranks that communicate over {process.backend.dist_backend}, but these {size} ranks use "
            "gloo, because they share GPUs or MIG instances, or because gloo was requested. Launch at most one "
            "process per GPU, or try backend='cpu'"
        )


def _batch_size(loader: DataLoader) -> int | None:
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return size if isinstance(size, int) else None


def _gather_as_one(library: Any, model: torch.nn.Module, class_names: str | None) -> None:
    """Make stage 3 gather each layer of these classes as a whole, for layers that use only some of their submodules."""
    if not class_names:
        return
    names = {name.strip() for name in class_names.split(",")}
    kinds = {type(module) for module in model.modules() if type(module).__name__ in names}
    missing = names - {kind.__name__ for kind in kinds}
    if missing:
        raise ValueError(
            f"transformer_moe_cls_names={class_names!r}: the {type(model).__name__} has no {', '.join(sorted(missing))}"
        )
    library.utils.set_z3_leaf_modules(model, list(kinds))


def _report(engine: Any, name: str, process: JoinedProcess) -> None:
    """Emit a note about how a model of class ``name`` is sharded, if several ranks hold shards. All ranks call this."""
    stage, num_ranks = int(engine.zero_optimization_stage()), process.topology.world_size
    if not stage or num_ranks == 1:
        return
    model_bytes = sum(
        deepspeed_config.num_elements_of(parameter) * parameter.element_size()
        for parameter in engine.module.parameters()
    )
    if stage == 3:
        sharded: list[Any] = deepspeed_library.sharded_parameters(engine.module)
        own_bytes = sum(
            parameter.ds_tensor.numel() * parameter.ds_tensor.element_size() for parameter in sharded
        )
        report_shards(name, model_bytes, own_bytes, "; gradients and optimizer states, too (ZeRO stage 3)")
    elif process.topology.rank == 0:
        what = "optimizer states" if stage == 1 else "gradients and optimizer states"
        held = f"{formatting.size(model_bytes)} of weights on each of {num_ranks} ranks"
        text = f"{name}: {held}; {what} are sharded (ZeRO stage {stage})"
        context.current().emit(Note.of_job(text))
