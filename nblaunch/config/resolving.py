"""Settings from several places made one, with where each came from; and whether they go together."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nblaunch.config.settings import SETTINGS

DEFAULT = "default"

_NEEDED = {
    "fsdp_config": ("strategy", ("fsdp",), "use_fsdp"),
    "deepspeed_config": ("strategy", ("deepspeed",), "use_deepspeed"),
}
"""Group -> the setting that it hangs on, the values it needs, and the option that gives them."""


class ConfigError(ValueError):
    """A setting has a value that it can't have, or two contradict each other. The message is one line."""


@dataclass(frozen=True)
class Layer:
    """What one place says.

    Args:
        source: the place, as ``command line`` or a file.
        values: name of a setting -> value, converted; None is a value as well, where a setting may be none.
        notes: what was read and changes nothing, a sentence each.
    """

    source: str
    values: Mapping[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Resolved:
    """A value for every setting.

    Args:
        values: name -> value.
        sources: name -> where it came from.
        notes: of all layers.
    """

    values: Mapping[str, Any]
    sources: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def is_set(self, name: str) -> bool:
        """Whether it was given, be it as its default."""
        return self.sources[name] != DEFAULT

    def group(self, group: str) -> dict[str, Any]:
        """The settings of a group that were given."""
        return {
            name: self.values[name]
            for name in self.values
            if SETTINGS[name].group == group and self.is_set(name)
        }


def convert(name: str, value: Any, label: str = "") -> Any:
    """``value`` as the type of the setting ``name``; ``label`` is its name in messages.

    Raises:
        ConfigError: it is none of its values, or there is no such setting.
    """
    label = label or name
    if name not in SETTINGS:
        raise ConfigError(unknown(label, SETTINGS))
    try:
        return SETTINGS[name].kind.convert(value)
    except ValueError as error:
        raise ConfigError(f"{label}: {shown(value)} {error}") from None


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


def shown(value: Any) -> str:
    """``value`` in a message: one line, and short, however much it holds."""
    return _SHORT.repr(value)


def named(name: Any) -> str:
    """A name in a message: as it stands, if it is a word."""
    return name if isinstance(name, str) and name.isidentifier() and len(name) <= 80 else shown(name)


def unknown(name: str, valid: Sequence[str] | Mapping[str, Any]) -> str:
    """``name`` is not known, and what was probably meant."""
    near = difflib.get_close_matches(name, list(valid), n=1)
    return f"{name} is unknown" + (f"; did you mean {near[0]}?" if near else "")


def resolve(layers: Sequence[Layer]) -> Resolved:
    """One value per setting; earlier layers beat later ones, and all beat the defaults.

    Raises:
        ConfigError: two settings contradict each other.
    """
    values, sources = {}, {}
    for name, setting in SETTINGS.items():
        layer = next((layer for layer in layers if name in layer.values), None)
        values[name] = layer.values[name] if layer is not None else setting.default
        sources[name] = layer.source if layer is not None else DEFAULT
    resolved = Resolved(values, sources, tuple(note for layer in layers for note in layer.notes))
    order = {layer.source: place for place, layer in enumerate(layers)} | {DEFAULT: len(layers)}
    _check_groups(resolved, order)
    _check_machines(resolved)
    _check_training(resolved, order)
    return resolved


def _check_groups(resolved: Resolved, order: Mapping[str, int]) -> None:
    """Refuse a strategy's settings without it, unless what chose another strategy was meant to override them."""
    for name in resolved.values:
        needed = _NEEDED.get(SETTINGS[name].group)
        if needed is None or not resolved.is_set(name):
            continue
        on, valid, option = needed
        overrides = order[resolved.sources[on]] < order[resolved.sources[name]]
        if resolved[on] not in valid and not overrides:
            raise ConfigError(
                f"{name} ({resolved.sources[name]}) is for --{option}, but {on} is {resolved[on]} "
                f"({resolved.sources[on]})"
            )
    for name in (
        "dynamo_mode",
        "dynamo_use_fullgraph",
        "dynamo_use_dynamic",
        "dynamo_use_regional_compilation",
    ):
        overrides = order[resolved.sources["dynamo_backend"]] < order[resolved.sources[name]]
        if resolved[name] and resolved["dynamo_backend"] == "no" and not overrides:
            raise ConfigError(f"{name} ({resolved.sources[name]}) needs a dynamo_backend, such as inductor")


def most_machines(resolved: Resolved) -> int:
    """``num_machines``, or its greatest value where it is a range."""
    return int(str(resolved["num_machines"]).rpartition(":")[2])


def _check_machines(resolved: Resolved) -> None:
    num_machines, machine_rank = most_machines(resolved), resolved["machine_rank"]
    if machine_rank >= num_machines:
        raise ConfigError(
            f"machine_rank={machine_rank} ({resolved.sources['machine_rank']}) must be below "
            f"num_machines={num_machines} ({resolved.sources['num_machines']}); ranks count from 0"
        )
    if num_machines == 1:
        return
    if resolved["rdzv_endpoint"] is None and resolved["main_process_ip"] is None:
        raise ConfigError(
            f"num_machines={num_machines} needs main_process_ip: where the others reach machine 0"
        )
    num_processes = resolved["num_processes"]
    if num_processes is not None and num_processes % num_machines:
        raise ConfigError(
            f"num_processes={num_processes} counts the processes of all machines together, and can't be shared "
            f"equally by num_machines={num_machines}"
        )


def _check_training(resolved: Resolved, order: Mapping[str, int]) -> None:
    backend = resolved["backend"]
    for name, is_used, others, noun in (
        ("downcast_bf16", resolved["downcast_bf16"], ("cpu", "cuda"), "TPUs"),
        ("gpu_ids", resolved["gpu_ids"] != "all", ("cpu", "xla"), "GPUs"),
    ):
        # Another device on the command line is meant to override a file that was written for this one.
        overrides = order[resolved.sources["backend"]] < order[resolved.sources[name]]
        if is_used and backend in others and not overrides:
            raise ConfigError(
                f"{name} ({resolved.sources[name]}) is for {noun}, but backend is {backend} "
                f"({resolved.sources['backend']})"
            )
    if resolved["strategy"] == "spmd" and backend in ("cpu", "cuda"):
        raise ConfigError(
            f"strategy=spmd is for TPUs, but backend is {backend} ({resolved.sources['backend']})"
        )
    if resolved["deepspeed_config_file"] is not None:
        both = [name for name in resolved.group("deepspeed_config") if name != "deepspeed_config_file"]
        if both:
            raise ConfigError(
                f"deepspeed_config_file says it all already; set {', '.join(both)} in that file"
            )
