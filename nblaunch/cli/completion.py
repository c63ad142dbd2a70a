"""``nblaunch completion``: print a script that completes commands and options in a shell."""

from __future__ import annotations

import argparse

from nblaunch import cli
from nblaunch.cli import UsageError

_SHELLS = ("bash", "zsh", "tcsh")


def set_up(parser: argparse.ArgumentParser) -> None:
    """Set up the command."""
    parser.description = (
        "Print a shell completion script for nblaunch's commands and options. Needs shtab (pip install shtab). For "
        "bash: nblaunch completion bash > ~/.local/share/bash-completion/completions/nblaunch"
    )
    parser.set_defaults(run=run)
    parser.add_argument("shell", choices=_SHELLS)


def run(arguments: argparse.Namespace) -> int:
    """Print the script and return the exit code."""
    try:
        import shtab
    except ImportError:
        raise UsageError("shtab must be installed: pip install shtab") from None
    print(shtab.complete(cli.parser_of(cli.COMMANDS), shell=arguments.shell))
    return 0
