"""Merges settings from several sources and checks that they agree."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nblaunch.config.settings import SETTINGS

DEFAULT = "default"

GPU_VARIABLES = {"cuda": "CUDA_VISIBLE_DEVICES", "rocm": "HIP_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
"""Backend -> the environment variable that selects its GPUs by number."""

_NEEDS: dict[str, tuple[str, Callable[[str], bool], str]] = {
    "fsdp_config": ("strategy", lambda chosen: chosen == "fsdp", "--use_fsdp"),
    "deepspeed_config": ("strategy", lambda chosen: chosen == "deepspeed", "--use_deepspeed"),
    "dynamo_config": (
        "dynamo_backend",
        lambda chosen: chosen != "no",
        "compilation, such as --dynamo_backend inductor",
    ),
    "downcast_bf16": ("backend", lambda chosen: chosen in ("auto", "xla"), "TPUs"),
    "gpu_ids": ("backend", lambda chosen: chosen in ("auto", *GPU_VARIABLES), "GPUs"),
}
"""Setting or group -> the setting that it depends on, a test of that setting's value, and its purpose."""


class ConfigError(ValueError):
    """A setting is invalid, or two settings contradict each other. The message is one line."""


@dataclass(frozen=True)
class Layer:
    """Settings of one source.

    Args:
        source: such as ``command line``, or the path of a file.
        values: setting -> converted value. None is also a value, for settings that accept it.
    """

    source: str
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Resolved:
    """A value for every setting.

    Args:
        values: setting -> value.
        sources: setting -> source of the value.
    """

    values: Mapping[str, Any]
    sources: Mapping[str, str]

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def is_set(self, name: str) -> bool:
        """Return whether the setting's value comes from a source other than the table's default."""
        return self.sources[name] != DEFAULT

    def group(self, group: str) -> dict[str, Any]:
        """Return the settings of a group that are set."""
        return {
            name: self.values[name]
            for name in self.values
            if SETTINGS[name].group == group and self.is_set(name)
        }


def convert(name: str, value: Any, label: str = "") -> Any:
    """Convert ``value`` to the type of the setting ``name``; messages call it ``label``.

    Raises:
        ConfigError: the value is invalid, or the setting is unknown.
    """
    label = label or name
    if name not in SETTINGS:
        raise ConfigError(unknown(label, SETTINGS))
    try:
        return SETTINGS[name].converter.convert(value)
    except ValueError as error:
        raise ConfigError(f"{label}: {shown(value)} {error}") from None


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def shown(value: Any) -> str:
    """Return ``value`` for a message: one line of at most about 80 characters."""
    return _SHORT.repr(value)


def named(name: Any) -> str:
    """Return ``name`` for a message: without quotes if it is an identifier."""
    return name if isinstance(name, str) and name.isidentifier() and len(name) <= 80 else shown(name)


def unknown(name: str, valid: Sequence[str] | Mapping[str, Any]) -> str:
    """Return a message that says that ``name`` is unknown, with the nearest of the ``valid`` names."""
    near = difflib.get_close_matches(name, list(valid), n=1)
    return f"{name} is unknown" + (f"; did you mean {near[0]}?" if near else "")


def resolve(layers: Sequence[Layer]) -> Resolved:
    """Merge layers into one value per setting; earlier layers override later ones and the defaults.

    Raises:
        ConfigError: two settings contradict each other.
    """
    values, sources = {}, {}
    for name, setting in SETTINGS.items():
        layer = next((layer for layer in layers if name in layer.values), None)
        values[name] = layer.values[name] if layer is not None else setting.default
        sources[name] = layer.source if layer is not None else DEFAULT
    resolved = Resolved(values, sources)
    order = {layer.source: i for i, layer in enumerate(layers)} | {DEFAULT: len(layers)}
    _check_needs(resolved, order)
    _check_machines(resolved)
    _check_training(resolved)
    return resolved


def _check_needs(resolved: Resolved, order: Mapping[str, int]) -> None:
    """Reject settings that another setting makes ineffective, unless a higher layer sets that other setting.

    A file may have been written for a different strategy or device than the command line selects.
    """
    for name, setting in SETTINGS.items():
        needs = _NEEDS.get(name) or _NEEDS.get(setting.group)
        if needs is None or resolved[name] is False or resolved[name] == setting.default:
            continue
        other, is_used, purpose = needs
        overrides = order[resolved.sources[other]] < order[resolved.sources[name]]
        if not is_used(resolved[other]) and not overrides:
            raise ConfigError(
                f"{name} ({resolved.sources[name]}) applies only to {purpose}, but {other} is {resolved[other]} "
                f"({resolved.sources[other]})"
            )


def most_machines(resolved: Resolved) -> int:
    """Return ``num_machines``, or its maximum if it is a range."""
    return int(str(resolved["num_machines"]).rpartition(":")[2])


def _check_machines(resolved: Resolved) -> None:
    num_machines, machine_rank = most_machines(resolved), resolved["machine_rank"]
    if machine_rank >= num_machines:
        raise ConfigError(
            f"machine_rank={machine_rank} ({resolved.sources['machine_rank']}) must be less than "
            f"num_machines={num_machines} ({resolved.sources['num_machines']}); ranks are numbered from 0"
        )
    if num_machines == 1:
        return
    if resolved["rdzv_endpoint"] is None and resolved["main_process_ip"] is None:
        raise ConfigError(
            f"num_machines={num_machines} needs main_process_ip, the address at which the other machines reach "
            "machine 0"
        )
    num_processes = resolved["num_processes"]
    if num_processes is not None and num_processes % num_machines:
        raise ConfigError(
            f"num_processes={num_processes} is the total on all machines and must be a multiple of "
            f"num_machines={num_machines}"
        )


def _check_training(resolved: Resolved) -> None:
    backend = resolved["backend"]
    if resolved["strategy"] == "spmd" and backend not in ("auto", "xla"):
        raise ConfigError(
            f"strategy=spmd works only on TPUs, but backend is {backend} ({resolved.sources['backend']})"
        )
    if resolved["deepspeed_config_file"] is not None:
        both = [name for name in resolved.group("deepspeed_config") if name != "deepspeed_config_file"]
        if both:
            raise ConfigError(f"deepspeed_config_file replaces {', '.join(both)}; set these in that file")
