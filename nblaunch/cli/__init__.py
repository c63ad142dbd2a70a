"""The command line: ``nblaunch <command>``, also as ``python -m nblaunch``.

:func:`main` calls the function that :data:`COMMANDS` names. It adds description and options to the command's parser,
and as defaults ``run``, which executes the command and returns the exit code, and maybe ``explain_unknown``, which
returns the message for unknown options.

No module imports torch or other slow packages before ``run``. A usage error is one line with the problem and the
remedy, and exit code 2.

    config.py            ``nblaunch config``
      questions.py       what it asks, and how
    launch.py            ``nblaunch launch``
      script_job.py      its job in a terminal: output, signals, exit code
    jobs.py              ``nblaunch jobs``, ``attach``, ``logs`` and ``stop``: jobs launched with ``detach=True``
    run_notebook.py      ``nblaunch run-notebook``
      notebook_client.py the notebook in its own kernel, the output of its cells on a terminal
    selfcheck.py         ``nblaunch test``
      selfcheck_jobs.py  its checks, each a launch
    estimate.py          ``nblaunch estimate-memory``
      memory_needs.py    its arithmetic
    merge.py             ``nblaunch merge-weights``
    environment.py       ``nblaunch env``
"""

from __future__ import annotations

import argparse
import ast
import os
import pkgutil
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from nblaunch.host import descriptors


class UsageError(Exception):
    """The command can't be executed; nothing was started. The message says why, and what to do."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line that refers to the help."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


def named_value(option: str, text: str, words: Mapping[str, Any] | None = None) -> tuple[str, Any]:
    """Return name and value of ``epochs=3``, where the value is a literal of Python, or else text.

    Args:
        option: to which ``text`` was given.
        text: of the form ``name=value``.
        words: in lower case, and what they stand for besides.

    Raises:
        UsageError: ``text`` has another form.
    """
    name, separator, value = text.partition("=")
    if not separator or not name.isidentifier():
        raise UsageError(f"{option} {text!r} is not of the form name=value")
    if words is not None and value.lower() in words:
        return name, words[value.lower()]
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


COMMANDS = {
    "config": ("config:set_up", "answer a few questions and write the defaults of `nblaunch launch`"),
    "launch": ("launch:set_up", "run a script on every device"),
    "jobs": ("jobs:set_up_jobs", "list the jobs that outlive their notebook"),
    "attach": ("jobs:set_up_attach", "follow a job that outlives its notebook"),
    "logs": ("jobs:set_up_logs", "print the log of a job that outlives its notebook"),
    "stop": ("jobs:set_up_stop", "end a job that outlives its notebook"),
    "env": ("environment:set_up", "report versions, devices and problems of this machine"),
    "test": ("selfcheck:set_up", "check that training works on this machine's devices"),
    "estimate-memory": ("estimate:set_up", "estimate how much memory a model takes, by strategy"),
    "merge-weights": ("merge:set_up", "put the shards of a model's checkpoint together"),
    "run-notebook": ("run_notebook:set_up", "execute a notebook, with progress in the terminal"),
}
"""Command -> the function that sets up its parser, and its line of the help, in the order of the help."""

USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2 for a usage error.

    Args:
        argv: arguments without the program's name; None = those of ``sys.argv``.
    """
    if argv is None:
        return _run(sys.argv[1:])
    before = signal.getsignal(signal.SIGINT)
    try:
        return _run(argv)
    finally:
        # At the end of a program a command may ignore interrupts; here the program goes on.
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, before)


def _run(argv: Sequence[str]) -> int:
    _open_closed_streams()
    first = next((argument for argument in argv if not argument.startswith("-")), "")
    command = first if first in COMMANDS else ""
    try:
        arguments = _parse(argv, command)
        return int(arguments.run(arguments))
    except UsageError as error:
        print(f"nblaunch{command and ' '}{command}: error: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:
        # The reader of the output has ended (`| head`), which is not an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _open_closed_streams() -> None:
    """Open /dev/null for closed standard streams (``>&-``), which are None in Python."""
    descriptors.occupy_standard_ones()
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open until the program ends


def _parse(argv: Sequence[str], command: str) -> argparse.Namespace:
    parser = _parser(command)
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        explain = getattr(arguments, "explain_unknown", None)
        raise UsageError(
            explain(rest) if explain is not None else f"unrecognized arguments: {' '.join(rest)}"
        )
    if arguments.command is None:
        parser.print_help(sys.stderr)
        raise UsageError("no command was given")
    return arguments


def _parser(command: str) -> argparse.ArgumentParser:
    """Return a parser with the options of one command, and the names of the others."""
    parser = Parser(
        prog="nblaunch",
        description="Run PyTorch training on every device of this machine, or of several.",
        allow_abbrev=False,
    )
    # This file may not import the package above it.
    version = f"nblaunch {sys.modules['nblaunch'].__version__}"
    parser.add_argument("--version", action="version", version=version)
    subparsers = parser.add_subparsers(dest="command", metavar="<command>", title="commands")
    for name, (set_up, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary)
        if name == command:
            pkgutil.resolve_name(f"nblaunch.cli.{set_up}")(subparser)
    return parser
