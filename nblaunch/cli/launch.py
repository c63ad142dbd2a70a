"""``nblaunch launch script.py``: runs a script on every device, supervised like a launch from a notebook.

    options ──┐
    file    ──┼──> settings ──> LaunchSpec ──> JobRunner (on several machines, NodeRunner) ──> exit code
    defaults ─┘

Workers start with ``spawn``, unless ``--start_method`` or the configuration file says otherwise. The table of settings
defines the options. ``nblaunch.config`` merges them with the file and the defaults, and ``script_job.py`` runs the job.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from nblaunch import env
from nblaunch.cli import UsageError
from nblaunch.config.files import find_layers
from nblaunch.config.launching import device_choice
from nblaunch.config.settings import (
    GROUPS,
    SETTINGS,
    SHORTHANDS,
    UNUSED,
    ConfigError,
    Layer,
    Resolved,
    convert,
    notes_on_unused,
    resolve,
    unknown,
    unsupported_reason,
)
from nblaunch.packages import is_installed
from nblaunch.setting import Setting, Switch
from nblaunch.worker.script import find_main

COMMAND_LINE = "command line"

_UNUSED_OPTIONS = {name: count for name, count in UNUSED.items() if count is not None}

_LETTERS = {"quiet": ["-q"], "tee": ["-t"]}


class Formatter(argparse.HelpFormatter):
    """Shows options only in the form with underscores; the parser also accepts hyphens."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=40, width=120)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        before = action.option_strings
        action.option_strings = [option for option in before if "-" not in option.lstrip("-")]
        try:
            return super()._format_action_invocation(action)
        finally:
            action.option_strings = before


def spellings(name: str) -> list[str]:
    """Return ``--a_b`` and ``--a-b``."""
    return list(dict.fromkeys([f"--{name}", f"--{name.replace('_', '-')}"]))


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add an option for every setting and shorthand, in the groups that ``GROUPS`` defines."""
    groups = {group: parser.add_argument_group(title) for group, title in GROUPS.items()}
    for name, (setting, _, text) in SHORTHANDS.items():
        groups[SETTINGS[setting].group].add_argument(
            *spellings(name), dest=name, action="store_true", help=text
        )
    for setting_ in SETTINGS.values():
        _add_setting(groups[setting_.group], setting_)
    for name, num_values in _UNUSED_OPTIONS.items():
        options: dict[str, Any] = {"action": "store_true"} if num_values == 0 else {}
        flags = [*_LETTERS.get(name, ()), *spellings(name)]
        parser.add_argument(*flags, help=argparse.SUPPRESS, **options)


def _add_setting(group: Any, setting: Setting) -> None:
    default = "" if setting.default in (None, False) else f" (default: {setting.default})"
    text = f"{setting.meaning}{default}".replace("%", "%%")
    if isinstance(setting.converter, Switch):
        group.add_argument(
            *spellings(setting.name), dest=setting.name, action="store_true", default=None, help=text
        )
    else:
        group.add_argument(
            *spellings(setting.name), dest=setting.name, metavar=setting.converter.metavar, help=text
        )


def layer_of(arguments: argparse.Namespace) -> Layer:
    """Return the options as a layer of settings.

    Raises:
        UsageError: an option has an invalid value, or two options contradict each other.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    try:
        for name in SETTINGS:
            if (value := getattr(arguments, name)) is not None:
                values[name] = convert(name, value, f"--{name} {value}")
                sources[name] = f"--{name} {value}"
    except ConfigError as error:
        raise UsageError(str(error)) from None
    for name, (setting, value, _) in SHORTHANDS.items():
        if not getattr(arguments, name):
            continue
        if setting in values and values[setting] != value:
            raise UsageError(f"{sources[setting]} and --{name} contradict each other; pass only one of them")
        values[setting], sources[setting] = value, f"--{name}"
    unused = {name: getattr(arguments, name) for name in _UNUSED_OPTIONS}
    return Layer(COMMAND_LINE, values, notes_on_unused(unused, COMMAND_LINE))


def explain_unknown(options: Iterable[str]) -> str:
    """Return one line that says for each option whether it is misspelt or belongs to a feature that nblaunch lacks."""
    valid = {*SETTINGS, *SHORTHANDS, "config_file", "module", "print_plan", "timeline"}
    sentences = []
    for option in options:
        name = option.lstrip("-").partition("=")[0].replace("-", "_")
        reason = unsupported_reason(name)
        if not option.startswith("-"):
            continue
        sentences.append(
            f"--{name}: {reason}"
            if reason
            else unknown(f"--{name}", [f"--{candidate}" for candidate in valid])
        )
    has_hint = any("; " in sentence or ": " in sentence for sentence in sentences)
    return "; ".join(sentences) + ("" if has_hint else "; see `nblaunch launch --help`")


_DESCRIPTION = """\
Run a Python script on every device of this machine or of several machines, one process per device. Options can be
written with underscores or hyphens. Settings that you omit come from the configuration file that `nblaunch config`
writes, or are chosen automatically. Rank 0 reads standard input. What ranks print to stdout and stderr goes to stdout,
in order; each line begins with the rank of its process. The exit code is 1 if the script raised an exception; otherwise
it is the exit code of the rank that failed first.
"""


def set_up(parser: argparse.ArgumentParser) -> None:
    """Set up the command."""
    parser.description = _DESCRIPTION
    parser.usage = (
        "nblaunch launch [options] script.py [arguments of the script]\n"
        "       nblaunch launch [options] -m module [arguments of the module]"
    )
    parser.formatter_class = Formatter
    parser.allow_abbrev = False
    parser.set_defaults(run=run, explain_unknown=explain_unknown)
    parser.add_argument(
        "-m",
        "--module",
        action="store_true",
        help="treat the script as the name of a module, as in python -m",
    )
    parser.add_argument(
        *spellings("config_file"), metavar="FILE", help="configuration file to use instead of the default one"
    )
    parser.add_argument(
        *spellings("print_plan"),
        action="store_true",
        help="show every setting and its source without starting anything",
    )
    parser.add_argument(
        *spellings("timeline"),
        metavar="FILE",
        help="write a timeline of each rank for https://ui.perfetto.dev (x.json, or x.json.gz for a compressed file)",
    )
    parser.epilog = f"Options of accelerate launch that have no effect: --{', --'.join(_UNUSED_OPTIONS)}."
    add_settings(parser)
    parser.add_argument("script", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Launch the script and return its exit code."""
    resolved = _resolve(arguments)
    env.apply(device_choice(resolved))
    if arguments.print_plan:
        from nblaunch.cli.script_job import print_plan

        return print_plan(resolved, arguments.script)
    _check_script(arguments.script, arguments.module)
    _check_libraries(resolved)
    timeline = _checked_file(arguments.timeline)
    from nblaunch.cli.script_job import launch_script

    return launch_script(
        resolved, arguments.script, arguments.arguments, is_module=arguments.module, timeline=timeline
    )


def _checked_file(name: str | None) -> Path | None:
    """Return the path of the timeline.

    Raises:
        UsageError: the file can't be written.
    """
    if name is None:
        return None
    path = Path(name).expanduser().absolute()
    if path.is_dir():
        raise UsageError(f"--timeline {name}: this is a folder; name a file")
    if not path.parent.is_dir():
        raise UsageError(f"--timeline {name}: the folder {path.parent} does not exist")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--timeline {name}: can't be written: permission denied")
    return path


def _resolve(arguments: argparse.Namespace) -> Resolved:
    """Resolve options, file and defaults, in this order of precedence."""
    options = layer_of(arguments)
    try:
        return resolve([options, *find_layers(arguments.config_file)])
    except ConfigError as error:
        raise UsageError(str(error)) from None


def _check_libraries(resolved: Resolved) -> None:
    if resolved["strategy"] == "deepspeed" and not is_installed("deepspeed"):
        raise UsageError(
            "strategy deepspeed needs DeepSpeed, which is not installed: pip install nblaunch[deepspeed]"
        )
    file = resolved["deepspeed_config_file"]
    if resolved["strategy"] == "deepspeed" and file is not None and not Path(file).expanduser().is_file():
        source = resolved.sources["deepspeed_config_file"]
        raise UsageError(f"deepspeed_config_file={file} ({source}): no such file")


def _check_script(script: str | None, is_module: bool) -> None:
    """Raise UsageError if the script can't be run."""
    if script is None:
        raise UsageError("no script given: nblaunch launch [options] script.py [arguments]")
    if is_module:
        _check_module(script)
        return
    path = Path(script)
    if not path.exists() and re.fullmatch(r"python[\d.]*", script):
        raise UsageError(
            f"{script}: leave out the interpreter: nblaunch launch [options] script.py [arguments]"
        )
    if not path.exists():
        raise UsageError(f"{script}: no such file; the working folder is {os.getcwd()}")
    if not path.is_file() and find_main(script) is None:
        raise UsageError(
            f"{script}: this folder has no __main__.py; to launch a package, pass its name with -m"
        )
    if not os.access(path, os.R_OK):
        raise UsageError(f"{script}: can't be read: permission denied")


def _check_module(name: str) -> None:
    """Raise UsageError if a module's package is neither in the working folder nor installed, without importing
    anything.
    """
    outermost, *_ = name.split(".")
    before = sys.path[:]
    sys.path.insert(0, os.getcwd())
    try:
        is_there = importlib.util.find_spec(outermost) is not None
    except (ImportError, ValueError):
        is_there = False
    finally:
        sys.path[:] = before
    is_file = Path(name).is_file()
    if is_file or not is_there:
        hint = f"; launch a file without -m: nblaunch launch {name}" if is_file else ""
        raise UsageError(f"{name}: no such module in {os.getcwd()} or among the installed packages{hint}")
