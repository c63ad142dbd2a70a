"""The command line: ``nblaunch <command>``, also as ``python -m nblaunch``.

Owns the list of commands and how usage errors are shown. A command is one module of this folder with

    add_parser(subparsers)         its name, options and help, by ``subparsers.add_parser(...)``
    run(arguments) -> int          does it; the exit code
    explain_unknown(words) -> str  optional: the message for arguments that the parser does not know

Only the module of the command asked for is imported, and none imports torch or anything else that is slow before
``run``.

A usage error is one line that says what is wrong and what to do, and exit code 2.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from nblaunch.wire import descriptors


class UsageError(Exception):
    """The command can't do what it was asked for; nothing was started. The message says why, and what to do."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage before it; the help is there for who wants it."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


COMMANDS = {
    "config": ("nblaunch.cli.config", "answer a few questions and write the defaults of `nblaunch launch`"),
    "launch": ("nblaunch.cli.launch", "run a script on every device"),
    "env": ("nblaunch.cli.environment", "report versions, devices and what would not work here"),
    "test": ("nblaunch.cli.selfcheck", "check that training works on this machine's devices"),
    "estimate-memory": ("nblaunch.cli.estimate", "estimate how much memory a model takes, by strategy"),
    "run-notebook": ("nblaunch.cli.run_notebook", "execute a notebook, with progress in the terminal"),
}
"""Name of a command -> its module and its line of the help, in the order of the help."""

USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT, as shells report it

_OUTPUT_ERRORS = (errno.ENOSPC, errno.EIO)  # a full disk; a terminal that is gone


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2 for a usage error, which is one line.

    Args:
        argv: without the program's name; None = ``sys.argv``.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    _stand_in_for_closed_streams()
    asked = next((word for word in argv if not word.startswith("-")), "")
    command = asked if asked in COMMANDS else ""
    try:
        module = importlib.import_module(COMMANDS[command][0]) if command else None
        arguments = _parse(argv, command, module)
        _check_folder()
        return int(module.run(arguments)) if module is not None else USAGE_EXIT_CODE
    except UsageError as error:
        print(f"nblaunch{command and ' '}{command}: error: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): that is no error, and nothing can be reported.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS:
            raise
        print(f"nblaunch {command}: error: what there is to say can't be written: {error}", file=sys.stderr)
        return 1


def _stand_in_for_closed_streams() -> None:
    """A program may be started with its input or outputs closed (``>&-``); Python then has None for them."""
    descriptors.occupy_standard_ones()
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the program runs


def _check_folder() -> None:
    """Much of Python and of its libraries fails in odd ways in a folder that was removed."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the working folder was removed; go to another one") from None


def _parse(argv: Sequence[str], command: str, module: ModuleType | None) -> argparse.Namespace:
    parser = _parser(command, module)
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        explain = getattr(module, "explain_unknown", None)
        raise UsageError(
            explain(rest) if explain is not None else f"unrecognized arguments: {' '.join(rest)}"
        )
    if arguments.command is None:
        parser.print_help(sys.stderr)
        raise UsageError("no command was given")
    return arguments


def _parser(command: str, module: ModuleType | None) -> argparse.ArgumentParser:
    """The parser of one command; of the others it knows the names."""
    parser = Parser(
        prog="nblaunch",
        description="Run PyTorch training on every device of this machine, or of several.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="show the version and exit")
    subparsers = parser.add_subparsers(dest="command", metavar="<command>", title="commands")
    for name, (_, summary) in COMMANDS.items():
        if module is not None and name == command:
            module.add_parser(subparsers)
        else:
            subparsers.add_parser(name, help=summary)
    return parser


class _ShowVersion(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *unused: object) -> NoReturn:
        import importlib.metadata  # 40 ms

        print(f"nblaunch {importlib.metadata.version('nblaunch')}")
        parser.exit()
