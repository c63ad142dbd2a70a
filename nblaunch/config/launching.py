"""Conversion of resolved settings to a :class:`LaunchSpec`.

Settings count the processes on all machines; a ``LaunchSpec`` counts the processes on one machine. Settings for
strategies and compilers become arguments for ``Accelerator``'s plugins.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from nblaunch.config.accelerate_variables import accelerate_variables
from nblaunch.config.files import find_layers
from nblaunch.config.settings import (
    FIELDS,
    GPU_VARIABLES,
    UNUSED,
    ConfigError,
    Layer,
    Resolved,
    convert,
    most_machines,
    notes_on_unused,
    resolve,
    shown,
)
from nblaunch.spec import DEFAULT_PORTS, LaunchSpec

_OTHER_NAMES = {
    "dynamo_use_fullgraph": "fullgraph",
    "dynamo_use_dynamic": "dynamic",
    "fsdp_offload_params": "cpu_offload",
    "fsdp_transformer_layer_cls_to_wrap": "transformer_cls_names_to_wrap",
    "deepspeed_config_file": "hf_ds_config",
    "deepspeed_moe_layer_cls_names": "transformer_moe_cls_names",
}
"""Setting -> argument of a plugin, if it differs from the setting's name without the group's prefix."""

_WITHOUT_ARGUMENT = ("fp8_backend", "fsdp_version")
"""Settings that are not passed to a plugin, because each has a single valid value."""


def resolved_settings(config_file: str | os.PathLike[str] | None, options: Mapping[str, Any]) -> Resolved:
    """Resolve the arguments of a Python call, a file and the defaults, in this order of precedence.

    Args:
        config_file: path; None = the default file.
        options: setting -> value; None = not set. Accelerate's settings without effect are accepted.
    """
    values = {
        name: convert(name, value, f"{name}={shown(value)}")
        for name, value in options.items()
        if value is not None and name not in UNUSED
    }
    layer = Layer("argument", values, notes_on_unused(options, "argument"))
    return resolve([layer, *find_layers(config_file)])


def spec_of(
    resolved: Resolved, function: Callable[..., Any], args: tuple[Any, ...] = (), **fields: Any
) -> LaunchSpec:
    """Return the launch that the settings describe.

    Args:
        resolved: the settings.
        function: function that each process calls.
        args: arguments of the function.
        **fields: fields of :class:`LaunchSpec` that override the settings.

    Raises:
        ConfigError: the settings contradict each other.
    """
    values = {field: resolved[name] for name, field in FIELDS.items() if resolved.is_set(name)}
    if (
        resolved["rdzv_backend"] == "c10d"
        and resolved["rdzv_endpoint"] is None
        and resolved["main_process_ip"]
    ):
        port = resolved["main_process_port"] or DEFAULT_PORTS["c10d"]
        values["rdzv_endpoint"] = f"{resolved['main_process_ip']}:{port}"
    values["num_processes"] = processes_per_machine(resolved)
    values["is_spmd"] = resolved["strategy"] == "spmd"
    values["accelerator_arguments"] = accelerator_settings(resolved)
    values["notes"] = resolved.notes
    values["variables"] = accelerate_variables(resolved)
    try:
        return LaunchSpec(function=function, args=args, **(values | fields))
    except (TypeError, ValueError) as error:
        raise ConfigError(with_setting_names(str(error))) from None


def with_setting_names(text: str) -> str:
    """Return ``text`` with the names of settings in place of the names of ``notebook_launcher``'s arguments."""
    names = {field: name for name, field in FIELDS.items() if field != name} | {
        "use_port": "main_process_port"
    }
    return re.sub(rf"\b({'|'.join(names)})\b", lambda match: names[match[0]], text)


def device_choice(resolved: Resolved) -> dict[str, str | None]:
    """Return the environment variables that select GPUs; set them before GPUs are counted."""
    if resolved["gpu_ids"] == "all":
        return {}
    families = (
        GPU_VARIABLES if resolved["backend"] == "auto" else GPU_VARIABLES.keys() & {resolved["backend"]}
    )
    return {GPU_VARIABLES[family]: resolved["gpu_ids"] for family in families}


def processes_per_machine(resolved: Resolved) -> int | None:
    """Return ``num_processes`` per machine; None = one per device."""
    total: int | None = resolved["num_processes"]
    return None if total is None else total // most_machines(resolved)


def accelerator_settings(resolved: Resolved) -> dict[str, Any]:
    """Return defaults for the arguments of ``Accelerator()`` in workers."""
    settings: dict[str, Any] = {}
    if resolved["gradient_accumulation_steps"] is not None:
        settings["gradient_accumulation_steps"] = resolved["gradient_accumulation_steps"]
    if resolved["downcast_bf16"] and resolved["backend"] in ("auto", "xla"):
        settings["downcast_bf16"] = True
    if resolved["debug"]:
        settings["debug"] = True
    if resolved["dynamo_backend"] != "no":
        settings["dynamo_plugin"] = _arguments(resolved, "dynamo_config")
    if resolved.group("fp8_config"):
        settings["fp8_recipe"] = _arguments(resolved, "fp8_config")
    if resolved["strategy"] == "fsdp":
        settings["fsdp_plugin"] = _fsdp_arguments(resolved)
    if resolved["strategy"] == "deepspeed":
        settings["deepspeed_plugin"] = _deepspeed_arguments(resolved)
    if resolved.group("parallelism_config"):
        settings["parallelism_config"] = _parallelism_arguments(resolved)
    return settings


def _arguments(resolved: Resolved, group: str) -> dict[str, Any]:
    """Return a plugin's arguments, built from the settings in its group that the user has set."""
    prefix = group.removesuffix("config")
    return {
        _OTHER_NAMES.get(name, name.removeprefix(prefix)): value
        for name, value in resolved.group(group).items()
        if name not in _WITHOUT_ARGUMENT
    }


def _fsdp_arguments(resolved: Resolved) -> dict[str, Any]:
    plugin = _arguments(resolved, "fsdp_config")
    if not plugin.get("min_num_params"):
        plugin.pop("min_num_params", None)  # accelerate config writes 0 for "not set"
    names = plugin.get("transformer_cls_names_to_wrap")
    if names is not None:
        plugin["transformer_cls_names_to_wrap"] = [name.strip() for name in names.split(",")]
    return plugin


def _parallelism_arguments(resolved: Resolved) -> dict[str, Any]:
    chosen = resolved.group("parallelism_config")
    chosen.pop("use_parallelism_config", None)
    sizes = {name: value for name, value in chosen.items() if name.endswith("_size")}
    total, num_processes = math.prod(sizes.values()), resolved["num_processes"]
    if sizes.get("parallelism_config_sp_size", 1) > 1:
        raise ConfigError(
            "parallelism_config_sp_size: DeepSpeed's sequence parallelism is not available in nblaunch; "
            "parallelism_config_cp_size shards sequences with torch's context parallelism, on NVIDIA GPUs"
        )
    if 1 < total != num_processes is not None:
        product = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise ConfigError(f"num_processes={num_processes}, but {product} is {total}; they must be equal")
    return {name.removeprefix("parallelism_config_"): value for name, value in chosen.items()}


def _deepspeed_arguments(resolved: Resolved) -> dict[str, Any]:
    plugin = _arguments(resolved, "deepspeed_config")
    if not plugin.get("gradient_clipping"):
        plugin.pop("gradient_clipping", None)  # 0 means no clipping
    return plugin
