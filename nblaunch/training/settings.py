"""What an ``Accelerator`` was asked for: arguments sorted, checked and completed, refusals with a way out.

Settings come from arguments, then from the launcher, then from the environment. Nothing here touches a device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from nblaunch import context, env
from nblaunch.backends.base import Backend
from nblaunch.spec import parse_strategy
from nblaunch.training import precision
from nblaunch.training.deepspeed_options import AUTO, DeepSpeedPlugin, DeepSpeedPlugins
from nblaunch.training.fsdp_options import FullyShardedDataParallelPlugin
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

HANDLERS = (
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    AutocastKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    TorchDynamoPlugin,
)

# Arguments of the reference's Accelerator that are not supported yet, with what to do instead.
REFUSED_ARGUMENTS = {
    "megatron_lm_plugin": "models are spread with DistributedDataParallel, FSDP2 or DeepSpeed",
    "parallelism_config": "models are spread with DistributedDataParallel, FSDP2 or DeepSpeed",
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


def prepare_device(strategy: str | None, downcast_bf16: bool) -> None:
    """Configure the device before it is first used."""
    backend = context.current().backend
    if strategy is not None and parse_strategy(strategy):
        backend.span_devices()
    if downcast_bf16 or context.current().defaults.get("downcast_bf16"):
        backend.downcast_to_bf16()


def sort_handlers(handlers: Sequence[KwargsHandler]) -> dict[type, Any]:
    """``kwargs_handlers`` by their type, at most one of each.

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
    """Gradient accumulation from the two arguments that may set it; ValueError where both do."""
    if plugin is None:
        if num_steps == 1:
            launched = context.current().defaults.get("gradient_accumulation_steps")
            num_steps = launched or env.read("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")
        return GradientAccumulationPlugin(num_steps=num_steps)
    if num_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps={num_steps} and gradient_accumulation_plugin were both given; set "
            "num_steps in the plugin"
        )
    return plugin


def rng_types(asked: Sequence[str] | None) -> list[str]:
    """The generators that loaders make equal over ranks; ValueError for an unknown one."""
    kinds = ["generator"] if asked is None else [str(kind) for kind in asked]
    for kind in kinds:
        check_choice("rng_types item", kind, RNG_TYPES)
    return kinds


def data(split_batches: bool | None, config: DataLoaderConfiguration | None) -> DataLoaderConfiguration:
    """How loaders share data, from the two arguments that may say so; ValueError where they differ."""
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
    """How models are compiled, from the two arguments that may say so, else from the launcher or the environment.

    Raises:
        ValueError: both say so.
    """
    if backend is not None and plugin is not None:
        raise ValueError(
            f"dynamo_backend={backend!r} and dynamo_plugin were both given; set the backend in the plugin"
        )
    plugin = plugin or (handlers.get(TorchDynamoPlugin) if backend is None else None)
    if plugin is not None:
        return plugin
    launched = context.current().defaults.get("dynamo_plugin")
    if backend is None and launched is not None:
        return TorchDynamoPlugin(**launched)
    return TorchDynamoPlugin(
        backend=backend or env.read("ACCELERATE_DYNAMO_BACKEND"),
        mode=env.read("ACCELERATE_DYNAMO_MODE") or None,
        fullgraph=env.read("ACCELERATE_DYNAMO_USE_FULLGRAPH"),
        dynamic=env.read("ACCELERATE_DYNAMO_USE_DYNAMIC"),
        use_regional_compilation=env.read("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"),
    )


def sharding(
    session: Session,
    fsdp_plugin: FullyShardedDataParallelPlugin | None,
    plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None,
    plugins: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None,
) -> tuple[FullyShardedDataParallelPlugin | None, DeepSpeedPlugins | None]:
    """The plugins of torch and of DeepSpeed: those given, and where none is, that of the launch.

    Raises:
        ValueError: more than one was given.
    """
    launched = context.current().defaults
    is_given = any(one is not None for one in (fsdp_plugin, plugin, plugins, session.deepspeed))
    if not is_given and "fsdp_plugin" in launched:
        fsdp_plugin = FullyShardedDataParallelPlugin(**launched["fsdp_plugin"])
    elif not is_given and "deepspeed_plugin" in launched:
        plugin = DeepSpeedPlugin(**launched["deepspeed_plugin"])
    return fsdp_plugin, deepspeed(session, plugin, plugins, fsdp_plugin)


def fsdp(plugin: FullyShardedDataParallelPlugin | None) -> FullyShardedDataParallelPlugin | None:
    """``plugin``, once it is known to be one.

    Raises:
        TypeError: it is not.
    """
    if plugin is None or isinstance(plugin, FullyShardedDataParallelPlugin):
        return plugin
    raise TypeError(
        f"fsdp_plugin={plugin!r:.80} is a {type(plugin).__module__}.{type(plugin).__name__}; pass a "
        "nblaunch.FullyShardedDataParallelPlugin, which has the same fields"
    )


def deepspeed(
    session: Session,
    plugin: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None,
    plugins: DeepSpeedPlugin | Mapping[str, DeepSpeedPlugin] | None,
    fsdp_plugin: Any,
) -> DeepSpeedPlugins | None:
    """DeepSpeed's plugins from the two arguments that may have them, else those that the session has already.

    Raises:
        ValueError: both have, or models are to be sharded by torch as well.
        TypeError: what they have is no plugin.
    """
    if plugin is not None and plugins is not None:
        raise ValueError("deepspeed_plugin and deepspeed_plugins were both given; give one of them")
    given = plugin if plugins is None else plugins
    if given is None:
        return session.deepspeed
    if fsdp_plugin is not None:
        raise ValueError(
            "deepspeed_plugin and fsdp_plugin were both given; models are spread over ranks by one of them"
        )
    session.deepspeed = DeepSpeedPlugins(dict(given) if isinstance(given, Mapping) else {"default": given})
    return session.deepspeed


def deepspeed_accumulation(
    plugins: DeepSpeedPlugins | None, accumulation: GradientAccumulationPlugin
) -> GradientAccumulationPlugin:
    """Gradient accumulation as DeepSpeed's configuration says where nothing else does.

    Raises:
        ValueError: both say, and not the same.
    """
    key = "gradient_accumulation_steps"
    steps: Any = AUTO if plugins is None else plugins.active.get_value(key)
    if steps in (AUTO, accumulation.num_steps):
        return accumulation
    if accumulation.num_steps != 1:
        raise ValueError(
            f"the DeepSpeed configuration has {key}={steps}, which contradicts Accelerator({key}="
            f'{accumulation.num_steps}). Say it in one place, or write "auto" in the configuration.'
        )
    return dataclasses.replace(accumulation, num_steps=steps)


def deepspeed_precision(plugins: DeepSpeedPlugins | None, asked: str | None, backend: Backend) -> str | None:
    """The precision that was asked for, in the arguments or in DeepSpeed's configuration.

    Raises:
        ValueError: the configuration says another one than the argument, or one that the device can't do.
    """
    for name in ("fp16", "bf16"):
        if plugins is None or plugins.active.get_value(f"{name}.enabled") is not True:
            continue
        given = f"the DeepSpeed configuration has {name}.enabled=True, which"
        reason = backend.supports_precision(name)
        if reason is not None:
            raise ValueError(f"{given} can't be used on {backend.name}: {reason}")
        if asked is not None and str(getattr(asked, "value", asked)).lower() != name:
            raise ValueError(f"{given} contradicts mixed_precision={str(asked)!r}; set it in one place")
        return name
    return asked


def precision_of(session: Session, asked: str | None, handlers: dict[type, Any]) -> precision.Precision:
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
