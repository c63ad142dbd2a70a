"""``nblaunch launch --print_plan`` shows the planned launch and its reasons."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nblaunch.config.settings import SETTINGS, SHORTHANDS
from tests.cli.conftest import Ended, script

Command = Callable[..., Ended]


def rows(ended: Ended) -> dict[str, tuple[str, str]]:
    """Return setting name -> value and source."""
    assert ended.code == 0, ended.err
    table = ended.out.partition("\n\n")[0].splitlines()[1:]
    return {line.split()[0]: (line.split()[1], line.split(maxsplit=2)[2]) for line in table}


def test_every_value_names_its_source(command: Command) -> None:
    Path("mine.yaml").write_text("num_processes: 3\nmixed_precision: bf16\nmax_restarts: 1\n")
    ended = command(
        "launch", "--cpu", "--config_file", "mine.yaml", "--num-processes", "2", "--print_plan", script("")
    )
    found = rows(ended)
    assert found["num_processes"] == ("2", "command line")
    assert found["backend"] == ("cpu", "command line")
    assert found["mixed_precision"] == ("bf16", "file mine.yaml")
    assert found["rdzv_backend"] == ("static", "default")
    assert "2 cpu processes" in ended.out
    assert "started by spawn" in ended.out


def test_the_default_file_is_read(command: Command) -> None:
    path = Path("config/default.yaml")
    path.parent.mkdir()
    path.write_text("num_processes: 3\nuse_cpu: true\n")
    assert rows(command("launch", "--print_plan"))["num_processes"] == ("3", f"file {path.absolute()}")


def test_missing_hardware_is_reported_without_an_error(command: Command) -> None:
    ended = command("launch", "--tpu", "--num_processes", "8", "--print_plan")
    assert ended.code == 0
    assert "not possible on this machine: " in ended.out


def test_help_lists_every_option_once(capsys: pytest.CaptureFixture[str]) -> None:
    from nblaunch import cli

    with pytest.raises(SystemExit):
        cli.main(["launch", "--help"])
    text = capsys.readouterr().out
    for name in (*SETTINGS, *SHORTHANDS):
        assert text.count(f"  --{name} ") + text.count(f"  --{name}\n") == 1
        assert f"--{name.replace('_', '-')} " not in text or "_" not in name
