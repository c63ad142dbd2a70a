"""The command line: ``nblaunch <command>`` or ``python -m nblaunch <command>``.

:func:`main` calls the function that :data:`COMMANDS` names. The function adds a description and options to the
command's parser. It also sets defaults on the parser: ``run``, which executes the command and returns the exit code,
and optionally ``explain_unknown``, which returns the message for unknown options.

No module imports torch or other slow packages before ``run``. On a usage error, the program prints one line with the
problem and advice, and exits with code 2.

    config.py            ``nblaunch config`` and its questions
      launch.py          ``nblaunch launch``
      script_job.py      the job of ``launch`` in a terminal: output, signals, exit code
    jobs.py              ``nblaunch jobs``, ``attach``, ``logs`` and ``stop``: jobs launched with ``detach=True``
    run_notebook.py      ``nblaunch run-notebook``
      notebook_client.py runs the notebook in its own kernel and prints the output of its cells
    selfcheck.py         ``nblaunch test``
      selfcheck_jobs.py  the checks of ``test``; each is a launch
    estimate.py          ``nblaunch estimate-memory``
    merge.py             ``nblaunch merge-weights``
    environment.py       ``nblaunch env``
    __init__.py          the commands and their parsers; ``nblaunch completion``, which lists them for shells
"""

from __future__ import annotations

import argparse
import ast
import atexit
import difflib
import os
import pkgutil
import signal
import sys
import threading
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from nblaunch.host import descriptors
from nblaunch.user_code import ipython_shell


class UsageError(Exception):
    """The command can't be executed, and nothing was started. The message says why, and what to do."""


class Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, which refers to the help."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see `{self.prog} --help`")


def named_value(option: str, text: str, words: Mapping[str, Any] | None = None) -> tuple[str, Any]:
    """Parse ``epochs=3``; return the name, and the value as a Python literal or else as text.

    Args:
        option: option that ``text`` was passed to.
        text: text of the form ``name=value``.
        words: words in lower case -> the values that they stand for, in addition to Python's literals.

    Raises:
        UsageError: ``text`` does not have this form.
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
    "config": (".config:set_up", "ask a few questions and save the defaults for `nblaunch launch`"),
    "launch": (".launch:set_up", "run a script on every device"),
    "jobs": (".jobs:set_up_jobs", "list detached jobs"),
    "attach": (".jobs:set_up_attach", "follow a detached job"),
    "logs": (".jobs:set_up_logs", "print the log of a detached job"),
    "stop": (".jobs:set_up_stop", "end a detached job"),
    "env": (".environment:set_up", "report versions, devices and problems on this machine"),
    "test": (".selfcheck:set_up", "check that training works on this machine's devices"),
    "estimate-memory": (".estimate:set_up", "estimate the memory that a model needs, by strategy"),
    "merge-weights": (".merge:set_up", "merge the shards of a model's checkpoint"),
    "run-notebook": (".run_notebook:set_up", "execute a notebook and show its progress"),
    "completion": (":set_up_completion", "print a shell completion script"),
}
"""Command -> the function that sets up its parser, and its line in the help, which lists commands in this order."""

USAGE_EXIT_CODE = 2
INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2 for a usage error.

    Args:
        argv: arguments without the program's name; None = take them from ``sys.argv``, and end this program with the
            exit code.
    """
    if argv is None:
        _end(_run(sys.argv[1:]))
    before = signal.getsignal(signal.SIGINT)
    try:
        return _run(argv)
    finally:
        # A command ignores interrupts when its program is about to end, but a program that called main(argv)
        # continues.
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, before)


def _end(exit_code: int) -> NoReturn:
    """Exit as Python does, but skip releasing torch's modules, which takes almost a second."""
    is_own_program = ipython_shell() is None  # not ``%run -m nblaunch env`` in a cell
    if "torch" in sys.modules and is_own_program:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        # If a flush fails, ``sys.exit`` below lets Python report the error.
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_code)
    sys.exit(exit_code)


def _run(argv: Sequence[str]) -> int:
    _open_closed_streams()
    first = next((argument for argument in argv if not argument.startswith("-")), "")
    command = first if first in COMMANDS else ""
    try:
        if first and not command:
            hint = suggestion(first, COMMANDS) or "; see `nblaunch --help`"
            raise UsageError(f"unknown command {first!r}{hint}")
        arguments = _parse(argv, command)
        return int(arguments.run(arguments))
    except UsageError as error:
        print(f"nblaunch{command and ' '}{command}: error: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:
        # The process that reads the output, such as `| head`, has ended; that is not an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _open_closed_streams() -> None:
    """Open /dev/null in place of closed standard streams (``>&-``), which are None in Python."""
    descriptors.occupy_standard_ones()
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open until the program ends


def _parse(argv: Sequence[str], command: str) -> argparse.Namespace:
    parser = parser_of([command])
    arguments, rest = parser.parse_known_args(argv)
    if rest:
        explain = getattr(arguments, "explain_unknown", None)
        if explain is not None:
            raise UsageError(explain(rest))
        raise UsageError(f"unrecognized arguments: {' '.join(rest)}{suggestion(rest[0], arguments.options)}")
    if arguments.command is None:
        parser.print_help(sys.stderr)
        raise UsageError("no command given")
    return arguments


def suggestion(word: str, words: Iterable[str]) -> str:
    """Return ``; did you mean 'launch'?`` for a misspelt word, or an empty string."""
    near = difflib.get_close_matches(word, list(words), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def parser_of(commands: Container[str]) -> argparse.ArgumentParser:
    """Return a parser with the options of ``commands``, and only the names and summaries of the other commands."""
    parser = Parser(
        prog="nblaunch",
        description="Run PyTorch training on every device of one or more machines.",
        allow_abbrev=False,
    )
    # This file must not import the package above it.
    version = f"nblaunch {sys.modules['nblaunch'].__version__}"
    parser.add_argument("--version", action="version", version=version)
    subparsers = parser.add_subparsers(dest="command", metavar="<command>", title="commands")
    for name, (set_up, summary) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary)
        if name in commands:
            pkgutil.resolve_name(f"nblaunch.cli{set_up}")(subparser)
            subparser.set_defaults(options=list(subparser._option_string_actions))
    return parser


# --- nblaunch completion ----------------------------------------------------------------------------------------------

_SHELLS = ("bash", "zsh", "tcsh")


def set_up_completion(parser: argparse.ArgumentParser) -> None:
    """Set up the command."""
    parser.description = (
        "Print a shell completion script for nblaunch's commands and options. This needs shtab (pip install shtab). "
        "For bash: nblaunch completion bash > ~/.local/share/bash-completion/completions/nblaunch"
    )
    parser.set_defaults(run=_print_completion)
    parser.add_argument("shell", choices=_SHELLS)


def _print_completion(arguments: argparse.Namespace) -> int:
    """Print the script and return the exit code."""
    try:
        import shtab
    except ImportError:
        raise UsageError("shtab must be installed: pip install shtab") from None
    print(shtab.complete(parser_of(COMMANDS), shell=arguments.shell))
    return 0
