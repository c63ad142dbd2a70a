"""Configuration files: where they are, reading them with every mistake named, writing them with comments.

    # What a setting means.
    num_processes: 4

One format for ours and for those of ``accelerate config``: keys are the names of :data:`SETTINGS`, those of a strategy
may stand in a mapping of their own (``fsdp_config:``).
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nblaunch import env
from nblaunch.config import reference
from nblaunch.config.resolving import ConfigError, Layer, convert, named, shown, unknown
from nblaunch.config.settings import GROUPS, SECTIONS, SETTINGS

_MAX_UNKNOWN = 5
"""Unknown keys that a message names."""

_MAX_VALUES = 10_000
"""In a file; those that there are take a few hundred."""

_EXTRA_KEYS = ("gradient_accumulation_steps",)
"""Settings of other groups that the reference writes into ``deepspeed_config``."""


def default_path() -> Path:
    """The file that is read where no other is named: ``NBLAUNCH_CONFIG_FILE``, or one in the platform's folder."""
    chosen = env.read("NBLAUNCH_CONFIG_FILE")
    return Path(chosen).expanduser() if chosen else _platform_folder() / "nblaunch" / "default.yaml"


def _platform_folder() -> Path:
    """Source: XDG Base Directory Specification; Apple's File System Programming Guide; Windows' known folders."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Application Support"
    chosen = env.read("APPDATA" if sys.platform == "win32" else "XDG_CONFIG_HOME")
    # The specification: a relative path is invalid and must be ignored.
    return Path(chosen) if chosen and Path(chosen).is_absolute() else Path.home() / ".config"


def find_layers(config_file: str | os.PathLike[str] | None) -> list[Layer]:
    """What the file says that was named, else the default one; nothing where there is none.

    Raises:
        ConfigError: the named file is missing, or the file can't be used.
    """
    if config_file is not None:
        return [read(Path(config_file))]
    path = default_path()
    return [read(path)] if path.is_file() else []


def read(path: Path) -> Layer:
    """A configuration file as a layer of settings.

    Raises:
        ConfigError: it is missing, is no YAML, or has an unknown key or a value of a wrong type.
    """
    raw = _flattened(path, _load(path))
    try:
        ours, notes = reference.translated(raw)
        unknown_keys = [key for key in ours if key not in SETTINGS]
        if unknown_keys:
            raise ConfigError("; ".join(unknown(named(key), SETTINGS) for key in unknown_keys[:_MAX_UNKNOWN]))
        given = {name: value for name, value in ours.items() if value is not None}
        values = {name: convert(name, value) for name, value in given.items()}
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return Layer(f"file {path}", values, tuple(notes))


def _load(path: Path) -> dict[str, Any]:
    import yaml  # 15 ms, which commands without a file do not need

    try:
        content = _content(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file; `nblaunch config` writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: is not YAML: {_place_of(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold keys and values, but is a {type(content).__name__}")
    return content


def _place_of(error: Any) -> str:
    """What is wrong with a text that is no YAML, and where."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or not problem:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _content(text: str) -> Any:
    """What the YAML ``text`` holds.

    Raises:
        yaml.YAMLError: it is none, or a value in it is not what it seems to be; with the place.
    """
    import yaml

    loader = _loader()(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _refuse_endless(node, {})
        return loader.construct_document(node)
    except RecursionError:
        raise yaml.MarkedYAMLError(problem="nested too deeply", problem_mark=loader.get_mark()) from None
    finally:
        loader.dispose()


def _refuse_endless(node: Any, sizes: dict[int, int]) -> int:
    """How many values a node holds where aliases are written out; refuses what would fill the memory, or holds itself.

    Args:
        node: of YAML's tree.
        sizes: of nodes that were looked at; 0 while a node is being looked at.
    """
    import yaml

    if isinstance(node, yaml.ScalarNode):
        return 1
    size = sizes.get(id(node))
    if size is None:
        sizes[id(node)] = 0
        parts = (
            node.value
            if isinstance(node, yaml.SequenceNode)
            else [part for pair in node.value for part in pair]
        )
        size = sizes[id(node)] = 1 + sum(_refuse_endless(part, sizes) for part in parts)
    if size == 0 or size > _MAX_VALUES:
        problem = "holds itself" if size == 0 else f"holds more than {_MAX_VALUES:,} values"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    return size


def _loader() -> Any:
    import yaml

    class Loader(yaml.SafeLoader):
        """Says where a value is wrong, and refuses a key that is there twice, of which YAML would take the last."""

        def construct_object(self, node: Any, deep: bool = False) -> Any:
            try:
                return super().construct_object(node, deep)
            except (yaml.YAMLError, RecursionError):
                raise
            except (
                Exception
            ) as error:  # of a conversion, which trusts that the text has the form it seems to have
                kind = node.tag.rpartition(":")[2]
                problem = f"{shown(node.value)} is no valid {kind} ({error})"
                raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            pairs = node.value if isinstance(node, yaml.MappingNode) else []  # what else it is, YAML says
            keys = [self.construct_object(key, deep=True) for key, _ in pairs]
            twice = [key for place, key in enumerate(keys) if key in keys[:place]]
            if twice:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{named(twice[0])} is there twice", node.start_mark
                )
            return super().construct_mapping(node, deep)

    return Loader


def _flattened(path: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the file and of its sections together."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if key not in SECTIONS:
            flat[key] = value
            continue
        if value is None:
            continue
        if not isinstance(value, dict):
            raise ConfigError(f"{path}: {key}: must hold keys and values, but is {shown(value)}")
        for inner, inner_value in value.items():
            if inner in SETTINGS and SETTINGS[inner].group != key and inner not in _EXTRA_KEYS:
                raise ConfigError(f"{path}: {key}: {inner} does not belong there, but in the file itself")
            flat[inner] = inner_value
    return flat


def write(path: Path, values: Mapping[str, Any]) -> None:
    """Write settings as YAML with a comment for each, so that a reader ever sees the old file or the whole new one.

    Where ``path`` is a link, as in a folder of dotfiles, the file that it leads to is written.

    Raises:
        ConfigError: the folder or the file can't be written.
    """
    path = Path(os.path.realpath(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                file.write(render(values))
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise ConfigError(f"{path}: can't be written: {error.strerror}") from None


def render(values: Mapping[str, Any]) -> str:
    """Settings as commented YAML, in the order of the table."""
    lines = [
        "# Defaults of `nblaunch launch`, written by `nblaunch config`. An option on the command line beats them;"
    ]
    lines.append("# `nblaunch launch --help` lists all settings, and each may stand here.")
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


def _scalar(value: Any) -> str:
    import yaml

    if value is None:
        return "none"  # and not null, which leaves a setting open
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("...").strip()
