"""The command line: ``nblaunch <command>``, also as ``python -m nblaunch``.

Owns the list of commands and what a person sees of a wrong use. A command is one module of this folder with

    add_parser(subparsers)         its name, options and help, by ``subparsers.add_parser(...)``
    run(arguments) -> int          does it; the exit code
    explain_unknown(words) -> str  optional: what to say of arguments that the parser does not know

Only the module of the command asked for is imported (all of them for ``nblaunch --help``), and none imports torch or
anything else that is slow before ``run``.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import NoReturn

from nblaunch.cli.usage import Parser, UsageError

COMMANDS = {
    "config": "nblaunch.cli.config",
    "launch": "nblaunch.cli.launch",
    "env": "nblaunch.cli.environment",
    "test": "nblaunch.cli.selfcheck",
    "estimate-memory": "nblaunch.cli.estimate",
    "run-notebook": "nblaunch.cli.run_notebook",
}
"""Name of a command -> its module, in the order of the help."""

USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT, as shells tell it


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2 for a wrong use, which is told in one line.

    Args:
        argv: without the program's name; None = ``sys.argv``.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    asked = next((word for word in argv if not word.startswith("-")), "")
    names = [asked] if asked in COMMANDS and argv[0] == asked else list(COMMANDS)
    modules = {name: importlib.import_module(COMMANDS[name]) for name in names}
    try:
        arguments = _parse(argv, modules)
        return int(modules[arguments.command].run(arguments))
    except UsageError as error:
        print(f"nblaunch{f' {asked}' if len(names) == 1 else ''}: error: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:
        # Whoever read our output has gone (`| head`): nothing is wrong, and nobody is there to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parse(argv: Sequence[str], modules: Mapping[str, ModuleType]) -> argparse.Namespace:
    parser = _parser(modules)
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        explain = getattr(modules.get(arguments.command), "explain_unknown", None)
        raise UsageError(
            explain(rest) if explain is not None else f"unrecognized arguments: {' '.join(rest)}"
        )
    if arguments.command is None:
        parser.print_help(sys.stderr)
        raise UsageError("no command was given")
    return arguments


def _parser(modules: Mapping[str, ModuleType]) -> argparse.ArgumentParser:
    parser = Parser(
        prog="nblaunch",
        description="Run PyTorch training on every device of this machine, or of several.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="<command>", title="commands")
    for module in modules.values():
        module.add_parser(subparsers)
    return parser


class _ShowVersion(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> NoReturn:
        import importlib.metadata  # 40 ms

        print(f"nblaunch {importlib.metadata.version('nblaunch')}")
        parser.exit()
