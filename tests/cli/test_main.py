"""The entry point: behaviour that all commands share."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nblaunch import cli

PROGRAM = [sys.executable, "-m", "nblaunch"]


def test_help_names_every_command() -> None:
    text = subprocess.check_output([*PROGRAM, "--help"], text=True)
    assert all(name in text for name in cli.COMMANDS)


@pytest.mark.parametrize("arguments", [["--help"], ["launch", "--help"], ["config", "--help"], ["launch"]])
def test_light_commands_do_not_import_torch(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom nblaunch import cli\n"
        f"try:\n    cli.main({arguments!r})\nexcept SystemExit:\n    pass\n"
        "sys.exit(sorted({'torch', 'numpy', 'IPython', 'ipywidgets'} & sys.modules.keys()) or 0)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_an_unknown_command_is_rejected_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["lunch"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "lunch" in line
    assert "launch" in line


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams_are_tolerated(closed: str, tmp_path: Path) -> None:
    """Some service managers close them; pipes between launcher and workers must not get the numbers 0 to 2."""
    (tmp_path / "train.py").write_text(
        "import os, pathlib\nprint('a line')\npathlib.Path('rank' + os.environ['RANK']).touch()\n"
    )
    line = shlex.join([*PROGRAM, "launch", "--cpu", "--num_processes", "2", "--log_dir", "logs", "train.py"])
    ended = subprocess.run(["/bin/sh", "-c", f"{line} {closed}"], cwd=tmp_path, timeout=300)
    assert ended.returncode == 0
    assert {path.name for path in tmp_path.glob("rank*")} == {"rank0", "rank1"}


def test_questions_without_an_input_are_rejected(tmp_path: Path) -> None:
    line = shlex.join([*PROGRAM, "config", "--config_file", str(tmp_path / "mine.yaml")])
    ended = subprocess.run(["/bin/sh", "-c", f"{line} <&-"], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2
    assert "before an answer to this question" in ended.stderr.splitlines()[-1]


def test_the_callers_interrupt_handler_is_kept(tmp_path: Path) -> None:
    """Otherwise programs that it starts later would inherit an ignored SIGINT."""
    before = signal.getsignal(signal.SIGINT)
    script = tmp_path / "train.py"
    script.write_text("")
    options = "--cpu --num_machines 2 --main_process_ip 192.0.2.200"  # not an address of this machine
    assert cli.main(["launch", *options.split(), str(script)]) == 2
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("words", "meant"), [(["lunch", "train.py"], "launch"), (["env", "--jsno"], "--json"), (["enf"], "env")]
)
def test_a_misspelt_command_or_option_gets_a_suggestion(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"did you mean {meant!r}?" in line


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    pytest.importorskip("shtab")
    script = tmp_path / "nblaunch"
    script.write_text(subprocess.check_output([*PROGRAM, "completion", "bash"], text=True))
    complete = (
        'source "$0"; COMP_CWORD=$(( $# - 1 )); COMP_WORDS=("$@"); _shtab_nblaunch; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    for words, offered in (
        (["nblaunch", "la"], "launch"),
        (["nblaunch", "launch", "--num_p"], "--num_processes"),
    ):
        shown = subprocess.check_output(["bash", "-c", complete, script, *words], text=True, timeout=300)
        assert offered in shown.split()


PROGRAM_WITH_TORCH = """
import atexit, sys, types

class Large:
    def __del__(self):
        print("released")

torch = sys.modules["torch"] = types.ModuleType("torch")
torch.large = Large()
atexit.register(print, "exit handler")
print("no line end yet", end=" ")
sys.argv[1:] = ["lunch"]
from nblaunch.cli import main
main()
"""


def test_a_program_ends_without_releasing_torch() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM_WITH_TORCH], capture_output=True, text=True, timeout=300
    )
    assert (ended.returncode, ended.stdout) == (2, "no line end yet exit handler\n"), ended.stderr
    assert "did you mean 'launch'?" in ended.stderr
