"""Sorts, checks and completes the arguments of the ``Accelerator``'s constructor.

Settings that the Accelerators in a process share (precision, strategy, parallelism) default to an earlier Accelerator's
values. All others default to the launcher's value, the environment's value, or the documented default. The functions
return the resolved arguments and change nothing, with two exceptions: ``parallel_plugin`` completes the
ParallelismConfig and creates its mesh, and ``resolve_precision`` may switch an XLA device to bf16. The dataclasses for
arguments are in ``options.py``. The launcher's defaults are ``LaunchSpec.accelerator_defaults``, which each process
finds in its context. ``spec.py`` builds them from the launch's ``mixed_precision`` and ``accelerator_arguments``.
``notebook_launcher`` sets only the precision; a configuration file or the command line can set both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nblaunch import context, env
from nblaunch.backends.base import Backend
from nblaunch.spec import wants_spmd
from nblaunch.training import precision
from nblaunch.training.joining import JoinedProcess
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
    not_nblaunchs,
)
from nblaunch.training.parallelism import ParallelismConfig, check_context_parallel
from nblaunch.training.precision import AORecipeKwargs
from nblaunch.training.strategies import StrategyPlugin
from nblaunch.training.strategies.deepspeed.strategy import DeepSpeedPlugin
from nblaunch.training.strategies.dtensor_strategy import TensorParallelPlugin
from nblaunch.training.strategies.fsdp2.strategy import FullyShardedDataParallelPlugin
from nblaunch.training.strategies.replicated import ReplicatedPlugin

HANDLERS = (
    DistributedDataParallelKwargs,
    GradScalerKwargs,
    AutocastKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    TorchDynamoPlugin,
    AORecipeKwargs,
)

PLUGINS: Mapping[str, type[StrategyPlugin]] = {
    "fsdp_plugin": FullyShardedDataParallelPlugin,
    "deepspeed_plugin": DeepSpeedPlugin,
    "deepspeed_plugins": DeepSpeedPlugin,
}
"""Arguments of the Accelerator that take plugins of one class; ``strategy`` takes plugins of any class."""


_INSTEAD = {
    "megatron_lm_plugin": (
        "Accelerator(parallelism_config=ParallelismConfig(...)) divides ranks among data, sharded, tensor and "
        "context parallelism"
    ),
    "torch_tp_plugin": (
        "for tensor parallelism over N ranks, use Accelerator(parallelism_config=ParallelismConfig(tp_size=N))"
    ),
}


def reject_unsupported(unsupported: dict[str, Any], megatron_lm_plugin: Any, torch_tp_plugin: Any) -> None:
    """Raise an error for unknown arguments, and for arguments of Hugging Face Accelerate that are not supported."""
    plugins = {"megatron_lm_plugin": megatron_lm_plugin, "torch_tp_plugin": torch_tp_plugin}
    for name, value in {**unsupported, **plugins}.items():
        if name not in plugins:
            raise TypeError(f"Accelerator() got an unexpected keyword argument {name!r}")
        if value is not None:  # None is Accelerate's default, which many trainers pass on
            raise NotImplementedError(
                f"Accelerator({name}={value!r:.80}) is not supported by nblaunch yet; {_INSTEAD[name]}"
            )


def sort_handlers(handlers: Sequence[KwargsHandler]) -> dict[type, Any]:
    """Return ``kwargs_handlers`` by their type; raise ValueError for an unknown type, or two handlers of one type."""
    by_type: dict[type, Any] = {}
    for handler in handlers:
        kind = next((kind for kind in HANDLERS if isinstance(handler, kind)), None)
        if kind is None:
            valid = ", ".join(kind.__name__ for kind in HANDLERS)
            raise ValueError(f"kwargs_handlers has {handler!r:.80}, which is not one of {valid}")
        if kind in by_type:
            raise ValueError(f"kwargs_handlers has more than one {kind.__name__}")
        handler.check()
        by_type[kind] = handler
    return by_type


def resolve_accumulation(
    num_steps: int, plugin: GradientAccumulationPlugin | None
) -> GradientAccumulationPlugin:
    """Return the accumulation settings from the two arguments that may set them; raise ValueError if both do."""
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
    plugin.check()
    return plugin


def resolve_rng_types(asked: Sequence[str] | None) -> list[str]:
    """Return the generators that loaders synchronise across ranks; raise ValueError if one is unknown."""
    kinds = ["generator"] if asked is None else [str(kind) for kind in asked]
    for kind in kinds:
        check_choice("rng_type", kind, RNG_TYPES)
    return kinds


def resolve_data_config(
    split_batches: bool | None, config: DataLoaderConfiguration | None
) -> DataLoaderConfiguration:
    """Return the loaders' settings from the two arguments that set them; raise ValueError if they differ."""
    if config is None:
        return DataLoaderConfiguration(split_batches=bool(split_batches))
    if split_batches is not None and split_batches != config.split_batches:
        raise ValueError(
            f"split_batches={split_batches}, but dataloader_config has split_batches={config.split_batches}; "
            "set it in one place"
        )
    config.check()
    return config


def resolve_dynamo(
    backend: DynamoBackend | str | None, plugin: TorchDynamoPlugin | None, handlers: dict[type, Any]
) -> TorchDynamoPlugin:
    """Return the compiler's settings: from one of two arguments, or else from the launcher or the environment."""
    if backend is not None and plugin is not None:
        raise ValueError(
            f"dynamo_backend={backend!r} and dynamo_plugin were both given; set the backend in the plugin"
        )
    plugin = plugin or (handlers.get(TorchDynamoPlugin) if backend is None else None)
    if plugin is None:
        plugin = TorchDynamoPlugin(backend=backend)
    plugin.check()
    return plugin


def asks_for_spmd(strategy: StrategyPlugin | str | None) -> bool:
    """Return whether ``strategy`` is ``"spmd"``, so that this process drives all devices on its host.

    Raises:
        ValueError: ``strategy`` is an unknown name.
    """
    return strategy is not None and not isinstance(strategy, StrategyPlugin) and wants_spmd(strategy)


def given_plugin(
    deepspeed_plugin: Any, deepspeed_plugins: Any, fsdp_plugin: Any, strategy: StrategyPlugin | str | None
) -> StrategyPlugin | None:
    """Return the strategy plugin in these arguments, or None.

    Raises:
        ValueError: more than one was given.
        TypeError: an argument is not a plugin.
    """
    passed = {
        "deepspeed_plugin": deepspeed_plugin,
        "deepspeed_plugins": deepspeed_plugins,
        "fsdp_plugin": fsdp_plugin,
        "strategy": strategy if isinstance(strategy, StrategyPlugin) else None,
    }
    plugins = {name: value for name, value in passed.items() if value is not None}
    if len(plugins) > 1:
        raise ValueError(f"{' and '.join(plugins)} were both given; choose one strategy for all models")
    for name, value in plugins.items():
        return PLUGINS.get(name, type(value)).from_argument(name, value)
    return None


def argument_of(name: str) -> str:
    """Return the name of the Accelerator's argument that chooses the strategy ``name``."""
    return next((argument for argument, kind in PLUGINS.items() if kind.name == name), "strategy")


def resolve_parallelism(config: Any, kept: ParallelismConfig | None) -> ParallelismConfig | None:
    """Return how to divide the ranks: from the argument, an earlier Accelerator, the launch or the environment.

    None: all ranks are replicas.
    """
    if config is None:
        is_launched = "parallelism_config" in context.current().accelerator_defaults
        asked = is_launched or env.read("ACCELERATE_USE_PARALLELISM_CONFIG")
        return kept or (ParallelismConfig() if asked else None)
    if not isinstance(config, ParallelismConfig):
        raise TypeError(f"parallelism_config={config!r:.80} {not_nblaunchs(config, ParallelismConfig)}")
    return config


def parallel_plugin(
    plugin: StrategyPlugin, parallelism: ParallelismConfig, process: JoinedProcess
) -> StrategyPlugin:
    """Complete ``parallelism``, create its mesh, and return the strategy plugin for it.

    Args:
        plugin: the plugin to use unless ``parallelism`` needs another one.

    Raises:
        ValueError: the sizes, the plugin or the device do not support ``parallelism``.
    """
    is_fsdp = isinstance(plugin, FullyShardedDataParallelPlugin)
    parallelism.fit(process.topology.world_size, is_fsdp)
    check_context_parallel(parallelism, process.device)
    if process.backend.reduces_gradients_at_step:
        raise ValueError(
            f"parallelism_config works on CPUs and GPUs, not on {process.backend.name}; leave it out"
        )
    if process.topology.world_size > 1:
        parallelism.get_device_mesh(process.device.type)
    if is_fsdp or parallelism.total_size == parallelism.dp_replicate_size:
        return plugin
    if not isinstance(plugin, (ReplicatedPlugin, TensorParallelPlugin)):
        raise ValueError(
            f"parallelism_config can't be combined with {type(plugin).__name__}; leave the plugin out, or pass "
            "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())"
        )
    return FullyShardedDataParallelPlugin() if parallelism.is_for_fsdp else TensorParallelPlugin()


def plugin_if_none_given(
    kept: StrategyPlugin | None, handlers: Mapping[type, Any], parallelism: ParallelismConfig | None
) -> StrategyPlugin:
    """Return the plugin to use if none was passed: the one in use, the launch's, or else a ``ReplicatedPlugin``.

    Args:
        kept: the plugin of an earlier Accelerator in this process.
        handlers: the Accelerator's handlers, which may include settings for replicas.
        parallelism: how to divide ranks from now on; None: as before. If this does not shard models, an earlier plugin
            that does so is not kept.
    """
    without_shards = parallelism is not None and not parallelism.is_for_fsdp
    is_dropped = without_shards and isinstance(kept, FullyShardedDataParallelPlugin)
    if kept is not None and kept.is_kept and not is_dropped:
        return kept
    launched = context.current().accelerator_defaults
    for name, kind in PLUGINS.items():
        if name in launched:
            return kind.from_argument(name, kind())
    return ReplicatedPlugin(handlers)


def resolve_precision(
    asked: str | None, existing: precision.Precision | None, backend: Backend, handlers: Mapping[type, Any]
) -> precision.Precision:
    """Return a new precision: in the requested format, or else in the earlier Accelerator's or the launch's format.

    Raises:
        ValueError: see :func:`precision.make`.
    """
    before = None if existing is None else existing.name
    launched = context.current().accelerator_defaults.get("mixed_precision")
    name = asked or before or launched or env.read("ACCELERATE_MIXED_PRECISION") or "no"
    return precision.make(name, backend, handlers)
