"""What an ``Accelerator`` was asked for: arguments sorted, checked and completed, refusals with a way out.

Settings come from arguments, then from the launcher, then from the environment. Nothing here touches a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nblaunch import context, env
from nblaunch.spec import wants_spmd
from nblaunch.training import precision
from nblaunch.training.options import (
    RNG_TYPES,
    AutocastKwargs,
    DataLoaderConfiguration,
    DistributedDataParallelKwargs,
    DynamoBackend,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    ProfileKwargs,
    TorchDynamoPlugin,
    check_choice,
)
from nblaunch.training.session import Session
from nblaunch.training.strategies import PLUGINS, Strategy, StrategyPlugin, TrainingSetup
from nblaunch.training.strategies.default import DefaultPlugin

HANDLERS = (
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    AutocastKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    TorchDynamoPlugin,
)

_SPREAD = f"models are spread with DistributedDataParallel, or by one of the arguments {', '.join(PLUGINS)}, strategy"
# Arguments of the reference's Accelerator that are not supported yet, with what to do instead.
REFUSED_ARGUMENTS = {
    "megatron_lm_plugin": _SPREAD,
    "parallelism_config": _SPREAD,
}


def refuse(unsupported: dict[str, Any]) -> None:
    """Raise for unknown arguments, and for those that are not supported."""
    for name, value in unsupported.items():
        if name not in REFUSED_ARGUMENTS:
            raise TypeError(f"Accelerator() got an unexpected keyword argument {name!r}")
        if value is not None:  # None is the reference's default, passed on by many trainers
            raise NotImplementedError(
                f"Accelerator({name}={value!r:.80}) is not supported by nblaunch yet; {REFUSED_ARGUMENTS[name]}"
            )


def prepare_device(strategy: StrategyPlugin | str | None, downcast_bf16: bool) -> None:
    """Configure the device before it is first used.

    Raises:
        ValueError: ``strategy`` is neither a plugin nor a known name.
    """
    backend = context.current().backend
    if strategy is not None and not isinstance(strategy, StrategyPlugin) and wants_spmd(strategy):
        backend.enable_spmd()
    if downcast_bf16 or context.current().accelerator_defaults.get("downcast_bf16"):
        backend.downcast_to_bf16()


def sort_handlers(handlers: Sequence[KwargsHandler]) -> dict[type, Any]:
    """Return ``kwargs_handlers`` by their type, at most one of each.

    Raises:
        ValueError: one is of no known type, or there are two of the same.
    """
    by_type: dict[type, Any] = {}
    for handler in handlers:
        if not isinstance(handler, HANDLERS):
            valid = ", ".join(kind.__name__ for kind in HANDLERS)
            raise ValueError(f"kwargs_handlers has {handler!r:.80}, which is none of {valid}")
        if type(handler) in by_type:
            raise ValueError(f"kwargs_handlers has more than one {type(handler).__name__}")
        by_type[type(handler)] = handler
    return by_type


def accumulation(num_steps: int, plugin: GradientAccumulationPlugin | None) -> GradientAccumulationPlugin:
    """Return gradient accumulation from the two arguments that may set it; ValueError where both do."""
    if plugin is None:
        if num_steps == 1:
            launched = context.current().accelerator_defaults.get("gradient_accumulation_steps")
            num_steps = launched or env.read("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
        return GradientAccumulationPlugin(num_steps=num_steps)
    if num_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps={num_steps} and gradient_accumulation_plugin were both given; set "
            "num_steps in the plugin"
        )
    return plugin


def rng_types(asked: Sequence[str] | None) -> list[str]:
    """Return the generators that loaders make equal over ranks; ValueError for an unknown one."""
    kinds = ["generator"] if asked is None else [str(kind) for kind in asked]
    for kind in kinds:
        check_choice("rng_types item", kind, RNG_TYPES)
    return kinds


def data(split_batches: bool | None, config: DataLoaderConfiguration | None) -> DataLoaderConfiguration:
    """Return how loaders share data, from the two arguments that set it; ValueError where they differ."""
    if config is None:
        return DataLoaderConfiguration(split_batches=bool(split_batches))
    if split_batches is not None and split_batches != config.split_batches:
        raise ValueError(
            f"split_batches={split_batches}, but dataloader_config has split_batches={config.split_batches}; "
            "set it in one place"
        )
    return config


def dynamo(
    backend: DynamoBackend | str | None, plugin: TorchDynamoPlugin | None, handlers: dict[type, Any]
) -> TorchDynamoPlugin:
    """Return how models are compiled: from either of two arguments, else from the launcher or the environment.

    Raises:
        ValueError: both were given.
    """
    if backend is not None and plugin is not None:
        raise ValueError(
            f"dynamo_backend={backend!r} and dynamo_plugin were both given; set the backend in the plugin"
        )
    plugin = plugin or (handlers.get(TorchDynamoPlugin) if backend is None else None)
    if plugin is not None:
        return plugin
    launched = context.current().accelerator_defaults.get("dynamo_plugin")
    if backend is None and launched is not None:
        return TorchDynamoPlugin(**launched)
    return TorchDynamoPlugin(
        backend=backend or env.read("ACCELERATE_DYNAMO_BACKEND"),
        mode=env.read("ACCELERATE_DYNAMO_MODE") or None,
        fullgraph=env.read("ACCELERATE_DYNAMO_USE_FULLGRAPH"),
        dynamic=env.read("ACCELERATE_DYNAMO_USE_DYNAMIC"),
        use_regional_compilation=env.read("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"),
    )


def strategy_plugin(
    session: Session, arguments: Mapping[str, Any], handlers: Mapping[type, Any]
) -> StrategyPlugin:
    """Return what spreads models: the plugin that was passed, else the one in use or of the launch, else replicas.

    Args:
        session: keeps the plugin.
        arguments: those of the Accelerator that may have a plugin, by name; None: not given.
        handlers: may have settings of replicas.

    Raises:
        ValueError: more than one was given.
        TypeError: one was given something else.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if len(given) > 1:
        raise ValueError(
            f"{' and '.join(given)} were both given; models are spread over ranks by one of them"
        )
    session.plugin = _given_plugin(given) or _kept_plugin(session)
    if session.plugin is None:
        session.plugin = DefaultPlugin(handlers.get(DistributedDataParallelKwargs))
    return session.plugin


def _given_plugin(given: dict[str, Any]) -> StrategyPlugin | None:
    for name, value in given.items():
        return PLUGINS.get(name, type(value)).from_argument(name, value)
    return None


def _kept_plugin(session: Session) -> StrategyPlugin | None:
    if session.plugin is not None and session.plugin.is_kept:
        return session.plugin
    launched = context.current().accelerator_defaults
    for name, kind in PLUGINS.items():
        if name in launched:
            return kind.from_argument(name, kind(**launched[name]))
    return None


def precision_of(session: Session, asked: str | None, handlers: dict[type, Any]) -> precision.Precision:
    """Return the precision of this process: the first Accelerator decides, later ones agree or don't care."""
    existing = session.precision
    backend = session.process.backend
    scaling, autocast = handlers.get(GradScalerKwargs), handlers.get(AutocastKwargs)
    if existing is not None and asked is None:
        asked = existing.name
    default = context.current().accelerator_defaults.get("mixed_precision")
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


def build_strategy(
    session: Session, plugin: StrategyPlugin, own: precision.Precision, splits_batches: bool
) -> tuple[Strategy, precision.Precision]:
    """Build what spreads models, and resolve how they compute where it has a say in that.

    Args:
        session: keeps the strategy, its label and its precision.
        plugin: builds the strategy.
        own: the precision that was asked for.
        splits_batches: a loader's ``batch_size`` is that of all ranks together.
    """
    built = plugin.build(TrainingSetup(session.process, own, session.accumulation, splits_batches))
    session.label = built.label if built.holds_shards else ""
    session.strategies[id(built)] = built
    resolved = built.precision(own)
    if session.precision is own:
        session.precision = resolved
    return built, resolved
