"""The entry point: what every command has in common."""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys

import pytest

from nblaunch import cli

PROGRAM = [sys.executable, "-m", "nblaunch"]


def test_help_names_every_command() -> None:
    text = subprocess.check_output([*PROGRAM, "--help"], text=True)
    assert all(name in text for name in cli.COMMANDS)


@pytest.mark.parametrize("arguments", [["--help"], ["launch", "--help"], ["config", "--help"], ["launch"]])
def test_what_needs_no_torch_does_not_import_it(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom nblaunch import cli\n"
        f"try:\n    cli.main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "sys.exit(sorted({'torch', 'numpy', 'IPython', 'ipywidgets'} & sys.modules.keys()) or 0)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_line_of_a_command_is_its_own(name: str) -> None:
    module, summary = cli.COMMANDS[name]
    subparsers = argparse.ArgumentParser().add_subparsers()
    importlib.import_module(module).add_parser(subparsers)
    (shown,) = subparsers._choices_actions
    assert (shown.dest, shown.help) == (name, summary)


def test_an_unknown_command_is_refused_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lunch"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "lunch" in line
    assert "launch" in line
