"""``nblaunch config``: asks questions; the answers become the defaults of later launches.

nblaunch config            ask questions and write the file
nblaunch config default    write the default answers, and a precision
nblaunch config update     rewrite a file with the setting names of this version
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nblaunch.cli import UsageError
from nblaunch.cli.questions import Asker, Machine, ask_all, detected
from nblaunch.config import files
from nblaunch.config.settings import ConfigError, Layer, convert, resolve

_ACTIONS = ("default", "update")


def set_up(parser: argparse.ArgumentParser) -> None:
    """Set up the command."""
    parser.description = (
        "Ask a few questions and save the answers as the defaults of `nblaunch launch`. Answers can also come from "
        "a pipe, one per line; an empty line selects the default."
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "action",
        nargs="?",
        choices=_ACTIONS,
        help="default: save the defaults for this machine without asking; update: rewrite an existing file with "
        "the setting names of this version",
    )
    parser.add_argument(
        "--config_file", "--config-file", metavar="FILE", help="file to use instead of the default one"
    )
    parser.add_argument(
        "--mixed_precision",
        "--mixed-precision",
        metavar="NAME",
        help="with `default` only: no, fp16, bf16 or fp8",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the action and return the exit code."""
    file = arguments.config_file
    path = files.default_path() if file is None else Path(file).expanduser()
    precision = arguments.mixed_precision
    if precision is not None and arguments.action != "default":
        raise UsageError("--mixed_precision is for `nblaunch config default`, which asks no questions")
    try:
        if arguments.action == "update":
            return _update(path)
        return _write_default(path, precision) if arguments.action == "default" else _ask(path)
    except ConfigError as error:
        raise UsageError(str(error)) from None


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | bool:
    """Write defaults of ``nblaunch launch`` for this machine, like ``nblaunch config default``.

    Args:
        mixed_precision: ``"no"``, ``"fp16"`` or ``"bf16"``.
        save_location: path of the file; None = the default file of ``nblaunch launch``.

    Returns:
        The path; False if the file already exists, which leaves it unchanged.

    Raises:
        ValueError: the precision is unknown.
    """
    path = files.default_path() if save_location is None else Path(save_location).expanduser()
    if path.exists():
        print(f"{path}: already exists and is not overwritten")
        return False
    _write_detected(path, mixed_precision, "mixed_precision")
    return path


def _update(path: Path) -> int:
    """Rewrite a file with the same settings; replace names of older versions and of Accelerate."""
    return _write(path, files.read(path).values)


def _write_default(path: Path, mixed_precision: str | None) -> int:
    if path.exists():
        raise UsageError(
            f"{path}: already exists and is not overwritten; remove it, or choose another --config_file"
        )
    return _write_detected(path, mixed_precision, "--mixed_precision")


def _write_detected(path: Path, mixed_precision: str | None, label: str) -> int:
    """Write the defaults for this machine, with a precision unless it is None; messages call the values ``label``."""
    values = dict(detected(Machine.here()))
    if mixed_precision is not None:
        values["mixed_precision"] = convert("mixed_precision", mixed_precision, label)
    return _write(path, values)


def _ask(path: Path) -> int:
    if path.exists():
        print(f"{path} already exists; the answers will replace its contents")
    return _write(path, ask_all(Asker(), Machine.here()))


def _write(path: Path, values: Mapping[str, Any]) -> int:
    resolve([Layer("the answers", values)])  # raises if these settings can't be launched
    files.write(path, values)
    print(f"written to {path}; `nblaunch launch script.py` uses it{_how(path)}")
    return 0


def _how(path: Path) -> str:
    return "" if path == files.default_path() else f" with --config_file {path}"
