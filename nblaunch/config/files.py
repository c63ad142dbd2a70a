"""Configuration files: their default path, reading them, and writing them with comments.

    # The meaning of the setting.
    num_processes: 4

Keys are the names in :data:`SETTINGS`; a strategy's keys may be in their own mapping (``fsdp_config:``). Files written
by ``accelerate config`` have the same format and need no conversion. Values are read as plain text, because YAML 1.1
would read ``no`` as a flag and ``1:4`` as a number in base 60.
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nblaunch import env, formatting
from nblaunch.config.settings import (
    GROUPS,
    SECTIONS,
    SETTINGS,
    UNUSED,
    ConfigError,
    Layer,
    convert,
    is_off,
    named,
    notes_on_unused,
    shown,
    unknown,
    unsupported_reason,
)
from nblaunch.host.files import replace_file
from nblaunch.setting import Flag

_DISTRIBUTED_TYPES: dict[str, dict[str, Any]] = {
    "NO": {},
    "MULTI_CPU": {"backend": "cpu"},
    "MULTI_GPU": {"backend": "cuda"},
    "MULTI_XPU": {"backend": "xpu"},
    "XLA": {"backend": "xla"},
    "TPU": {"backend": "xla"},
    "FSDP": {"strategy": "fsdp"},
    "DEEPSPEED": {"strategy": "deepspeed"},
}

_NOT_SET = (("num_processes", "-1"), ("deepspeed_config_file", "none"))
"""Values that ``accelerate config`` writes for settings that the user did not choose."""

_MAX_UNKNOWN = 5
"""Maximum number of unknown keys that a message lists."""

_EXTRA_KEYS = ("gradient_accumulation_steps",)
"""Settings from other groups that ``accelerate config`` writes into ``deepspeed_config``."""


def default_path() -> Path:
    """Return the path of the file that is read if the user names none.

    This is ``NBLAUNCH_CONFIG_FILE`` if set, or else ``nblaunch/default.yaml`` in the user's configuration folder.
    Source: XDG Base Directory Specification.
    """
    chosen = env.read("NBLAUNCH_CONFIG_FILE")
    if chosen:
        return Path(chosen).expanduser()
    folder = Path(env.read("XDG_CONFIG_HOME") or "")
    # A relative path is invalid and must be ignored.
    return (folder if folder.is_absolute() else Path.home() / ".config") / "nblaunch" / "default.yaml"


def accelerate_path() -> Path:
    """Return the path of the file that ``accelerate config`` writes and ``accelerate launch`` reads by default.

    Source: accelerate 1.15, ``commands/config/config_args.py``.
    """
    cache = Path(env.read("XDG_CACHE_HOME") or "~/.cache")
    home = env.read("HF_HOME") or cache / "huggingface"
    return Path(home).expanduser() / "accelerate" / "default_config.yaml"


def find_layers(config_file: str | os.PathLike[str] | None) -> list[Layer]:
    """Read ``config_file``, or the default file if it is None.

    If the default file does not exist, and ``NBLAUNCH_CONFIG_FILE`` names no other, Accelerate's default file is read.
    If this does not exist either, no layers are returned.

    Raises:
        ConfigError: ``config_file`` is missing, or the file is invalid.
    """
    if config_file is not None:
        return [read(Path(config_file).expanduser())]
    path = default_path()
    if path.is_file():
        return [read(path)]
    if env.read("NBLAUNCH_CONFIG_FILE") or not accelerate_path().is_file():
        return []
    return [_read_of_accelerate(accelerate_path())]


def _read_of_accelerate(path: Path) -> Layer:
    """Read Accelerate's default file, which the user has not named; say so.

    Raises:
        ConfigError: nblaunch can't use the file.
    """
    advice = "`nblaunch config` writes a file for nblaunch, which then replaces it"
    try:
        layer = read(path)
    except ConfigError as error:
        raise ConfigError(f"{error} (this is the default file of `accelerate launch`; {advice})") from None
    return replace(
        layer, notes=(f"settings come from {path}, the default file of `accelerate launch`", *layer.notes)
    )


def read(path: Path) -> Layer:
    """Read a configuration file as a layer of settings.

    Raises:
        ConfigError: the file is missing, is not YAML, or has an unknown key or a value of the wrong type.
    """
    raw = _flattened(path, _load(path))
    try:
        settings = _translated(raw)
        unknown_keys = [key for key in settings if key not in SETTINGS]
        if unknown_keys:
            raise ConfigError("; ".join(unknown(named(key), SETTINGS) for key in unknown_keys[:_MAX_UNKNOWN]))
        values = {name: convert(name, value) for name, value in settings.items() if not _is_null(value)}
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    source = f"file {path}"
    return Layer(source, values, notes_on_unused(raw, source))


def _load(path: Path) -> dict[str, Any]:
    import yaml  # takes 15 ms; commands without a file do not need it

    try:
        content = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; `nblaunch config` creates one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        raise ConfigError(f"{path}: invalid YAML: {_describe_yaml_error(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must contain keys and values, but is {formatting.kind(content)}")
    return content


def _describe_yaml_error(error: Exception) -> str:
    """Return one line that says what is wrong with the text, and in which line and column if known."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return place + textwrap.shorten(problem or f"{type(error).__name__}: {error}", 200)


def _is_null(value: Any) -> bool:
    # "none" does not count as null, because it is a valid value for some settings.
    return isinstance(value, str) and value.lower() in ("", "~", "null")


def _flattened(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the file and of its sections in one mapping."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if key not in SECTIONS:
            flat[key] = value
            continue
        if _is_null(value):
            continue
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: {key}: must contain keys and values, but is {shown(value)}")
        for name, inner_value in value.items():
            # Accelerate's questionnaire omits the prefix in this section.
            inner = f"fp8_{name}" if key == "fp8_config" and not name.startswith("fp8_") else name
            if inner in SETTINGS and SETTINGS[inner].group != key and inner not in _EXTRA_KEYS:
                raise ConfigError(f"{path}: {key}: {inner} belongs at the top level of the file")
            flat[inner] = inner_value
    return flat


def _translated(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Translate keys from ``accelerate config`` into settings; return unknown keys unchanged.

    Source: accelerate 0.20, 1.0 and 1.15, ``commands/config/config_args.py`` (``ClusterConfig``) and the keys of its
    questionnaire in ``commands/config/cluster.py``.

    Args:
        raw: keys and values of the file, with nested mappings flattened.

    Raises:
        ConfigError: the file asks for a feature that nblaunch does not have.
    """
    settings: dict[str, Any] = {}
    for key, value in raw.items():
        if key in UNUSED or (key, value) in _NOT_SET:
            continue
        if reason := unsupported_reason(key):
            if not is_off(value):
                raise ConfigError(f"{key}: {reason}")
        elif key not in ("compute_environment", "distributed_type", "use_cpu", "fp16"):
            settings[key] = value
    _check_environment(raw)
    return _translated_device(raw) | settings


def _check_environment(raw: Mapping[str, Any]) -> None:
    environment = raw.get("compute_environment", "LOCAL_MACHINE")
    if environment != "LOCAL_MACHINE":
        raise ConfigError(
            f"compute_environment: {named(environment)} is not available in nblaunch; only LOCAL_MACHINE is"
        )


def _flag(raw: Mapping[str, Any], key: str) -> bool:
    value = raw.get(key, "")
    try:
        return not _is_null(value) and Flag().convert(value)
    except ValueError as error:
        raise ConfigError(f"{key}: {shown(value)} {error}") from None


def _translated_device(raw: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    kind = raw.get("distributed_type", "")
    if not _is_null(kind):
        if kind not in list(_DISTRIBUTED_TYPES):  # the value may be a list, which a dict can't look up
            valid = ", ".join(_DISTRIBUTED_TYPES)
            raise ConfigError(
                f"distributed_type: {named(kind)} is not available in nblaunch; valid values are {valid}"
            )
        settings |= _DISTRIBUTED_TYPES[kind]
        if kind == "NO":
            settings["num_processes"] = 1
    if _flag(raw, "use_cpu"):
        settings["backend"] = "cpu"
    if _flag(raw, "fp16") and "mixed_precision" not in raw:
        settings["mixed_precision"] = "fp16"
    return settings


def write(path: Path, values: Mapping[str, Any]) -> None:
    """Write settings atomically as commented YAML, or as JSON if the file name ends with ``.json``.

    If ``path`` is a symbolic link, as in a folder of dotfiles, its target is written.

    Raises:
        ConfigError: the folder or the file can't be written.
    """
    path = Path(os.path.realpath(path))
    text = render_json(values) if path.suffix == ".json" else render(values)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda aside: aside.write_text(text, encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: can't be written: {error.strerror}") from None


def render(values: Mapping[str, Any]) -> str:
    """Return settings as commented YAML, in the order of the table."""
    lines = [
        "# Defaults for `nblaunch launch`, written by `nblaunch config`. Options on the command line override them.",
        "# `nblaunch launch --help` lists all settings; you can set each of them here.",
    ]
    for group, title in GROUPS.items():
        chosen = {name: value for name, value in values.items() if SETTINGS[name].group == group}
        if not chosen:
            continue
        lines += ["", f"# --- {title}"]
        indent = "  " if group in SECTIONS else ""
        lines += [f"{group}:"] if indent else []
        for name in (name for name in SETTINGS if name in chosen):
            lines += [f"{indent}# {SETTINGS[name].meaning}", f"{indent}{name}: {_scalar(chosen[name])}"]
    return "\n".join(lines) + "\n"


def render_json(values: Mapping[str, Any]) -> str:
    """Return settings as JSON in the order of the table; the YAML reader also accepts JSON."""
    content: dict[str, Any] = {}
    for name in (name for name in SETTINGS if name in values):
        group = SETTINGS[name].group
        section = content.setdefault(group, {}) if group in SECTIONS else content
        section[name] = "none" if values[name] is None else values[name]  # null would mean "not set"
    return json.dumps(content, indent=2, ensure_ascii=False) + "\n"


def _scalar(value: Any) -> str:
    import yaml

    if value is None:
        return "none"  # null would mean "not set"
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("...").strip()
