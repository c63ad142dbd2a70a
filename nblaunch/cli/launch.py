"""``nblaunch launch script.py``: a script on every device, supervised like a launch from a notebook.

    options ──┐
    file    ──┼──> settings ──> LaunchSpec ──> Job ──> exit code of the rank that failed first
    defaults ─┘

Owns what is refused before anything starts. The settings are ``nblaunch.config``'s business, the running of a job that
of ``supervised.py``.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from nblaunch import env
from nblaunch.cli import options
from nblaunch.cli.usage import UsageError
from nblaunch.config.files import find_layers
from nblaunch.config.launching import device_choice
from nblaunch.config.resolving import ConfigError, Resolved, resolve
from nblaunch.packages import is_installed

_DESCRIPTION = """\
Run a Python script on every device of this machine, one process each, or on several machines. Options can be written
with underscores or hyphens. What is not given here comes from the configuration file that `nblaunch config` writes,
and else is found out. All output has the rank of its process in front; the exit code is that of the rank that failed
first."""


def add_parser(subparsers: Any) -> None:
    """The command and its options, which are the table of settings."""
    parser = subparsers.add_parser(
        "launch",
        help="run a script on every device",
        description=_DESCRIPTION,
        usage="nblaunch launch [options] script.py [arguments of the script]\n"
        "       nblaunch launch [options] -m module [arguments of the module]",
        formatter_class=options.Formatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="the script is the name of a module, as for python -m"
    )
    parser.add_argument(
        *options.spellings("config_file"), metavar="FILE", help="settings, instead of the default file"
    )
    parser.add_argument(
        *options.spellings("print_plan"),
        action="store_true",
        help="show every setting and where it came from; start nothing",
    )
    options.add_settings(parser)
    parser.add_argument("script", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Launch the script; returns its exit code."""
    resolved = _resolve(arguments)
    env.apply(device_choice(resolved))
    if arguments.print_plan:
        from nblaunch.cli.plan import print_plan

        return print_plan(resolved, arguments.script)
    _check_script(arguments.script, arguments.module)
    _check_libraries(resolved)
    for note in resolved.notes:
        print(f"nblaunch: {note}", file=sys.stderr)
    from nblaunch.cli.supervised import launch_script

    return launch_script(resolved, arguments.script, arguments.arguments, is_module=arguments.module)


explain_unknown = options.explain_unknown


def _resolve(arguments: argparse.Namespace) -> Resolved:
    """The options over the file over the defaults."""
    given = options.given_layer(arguments)
    try:
        return resolve([given, *find_layers(arguments.config_file)])
    except ConfigError as error:
        raise UsageError(str(error)) from None


def _check_libraries(resolved: Resolved) -> None:
    if resolved["strategy"] == "deepspeed" and not is_installed("deepspeed"):
        raise UsageError(
            "strategy deepspeed needs DeepSpeed, which is not installed: pip install nblaunch[deepspeed]"
        )
    file = resolved["deepspeed_config_file"]
    if resolved["strategy"] == "deepspeed" and file is not None and not Path(file).is_file():
        source = resolved.sources["deepspeed_config_file"]
        raise UsageError(f"deepspeed_config_file={file} ({source}): there is no such file")


def _check_script(script: str | None, is_module: bool) -> None:
    """Refuse what can't be run, before anything is started."""
    if script is None:
        raise UsageError("no script was given: nblaunch launch [options] script.py [arguments]")
    if is_module:
        _check_module(script)
        return
    path = Path(script)
    if not path.exists():
        raise UsageError(f"{script}: there is no such file; scripts are looked for in {os.getcwd()}")
    if not path.is_file():
        raise UsageError(f"{script}: is not a file; a package is launched by its name, with -m")
    if not os.access(path, os.R_OK):
        raise UsageError(f"{script}: can't be read: permission denied")


def _check_module(name: str) -> None:
    before = sys.path[:]
    sys.path.insert(0, os.getcwd())
    try:
        is_there = _is_module(name)
    except (ImportError, ValueError):
        is_there = False
    finally:
        sys.path[:] = before
    if not is_there:
        hint = f"; a file is launched without -m: nblaunch launch {name}" if Path(name).is_file() else ""
        raise UsageError(f"{name}: there is no such module, neither in {os.getcwd()} nor installed{hint}")


def _is_module(name: str) -> bool:
    """Whether a module can be found. Unlike importlib's own search for a dotted name, this imports no package."""
    outermost, *inner = name.split(".")
    spec = importlib.util.find_spec(outermost)
    for part in inner:
        if spec is None or spec.submodule_search_locations is None:
            return False
        spec = importlib.machinery.PathFinder.find_spec(
            f"{spec.name}.{part}", spec.submodule_search_locations
        )
    return spec is not None
