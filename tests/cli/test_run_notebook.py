"""``nblaunch run-notebook`` with real kernels: its output, the written notebook, and its exit."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

from nblaunch import cli
from tests.terminal import Emulator, run_in_terminal

LAUNCH = """
import time
from nblaunch import Accelerator, notebook_launcher

def train(num_steps, end):
    accelerator = Accelerator()
    for step in accelerator.progress(range(num_steps)):
        time.sleep(0.05)
    print("rank", accelerator.process_index, end, flush=True)
    while end == "waits":
        time.sleep(0.05)
"""

PROGRAM = [sys.executable, "-m", "nblaunch", "run-notebook"]


def write(path: Path, *sources: str, parameters: int | None = None) -> Path:
    """Write a notebook with these code cells; the cell at ``parameters`` gets that tag."""
    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    if parameters is not None:
        cells[parameters].metadata["tags"] = ["parameters"]
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# title"), *cells]), path)
    return path


def run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PROGRAM, *map(str, words)], capture_output=True, text=True, timeout=300)


def outputs(path: Path) -> list[list[dict[str, Any]]]:
    return [cell.outputs for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def test_processes_make_progress_in_the_terminal(tmp_path: Path) -> None:
    launch = "notebook_launcher(train, (40, 'ends'), num_processes=2)"
    notebook = write(tmp_path / "train.ipynb", LAUNCH, launch, "6 * 7")
    code, written = run_in_terminal([*PROGRAM, str(notebook), "--output", str(tmp_path / "out.ipynb")])
    assert code == 0, written
    emulator, steps = Emulator(), {0: set(), 1: set()}  # type: ignore[var-annotated]
    for piece in re.split(r"(?=\r\x1b)", written):
        emulator.write(piece)
        for rank, step in re.findall(r"^ +([01]) .*?(\d+)/40\b", emulator.text, re.MULTILINE):
            steps[int(rank)].add(int(step))
    assert all(len(seen) >= 3 for seen in steps.values()), steps
    lines = emulator.lines
    assert lines.index("[1/3] import time") < lines.index(f"[2/3] {launch}") < lines.index("[0] rank 0 ends")
    assert "[1] rank 1 ends" in lines
    assert "[3/3] 6 * 7" in lines
    assert "42" in lines
    assert sum("train: done in" in line for line in lines) == 1
    assert sum("ranks 0 and 1 alike" in line for line in lines) == 1
    assert re.search(r"^train\.ipynb: done after [\d.]+ s; executed copy: ", emulator.text, re.MULTILINE)
    _, table, result = outputs(tmp_path / "out.ipynb")
    assert "train: done in" in str(table)
    assert result[0]["data"]["text/plain"] == "42"


def test_a_failing_cell_is_shown_and_ends_the_run(tmp_path: Path) -> None:
    notebook = write(
        tmp_path / "bad.ipynb",
        "print('before')",
        "def divide(x):\n    return 1 / x\ndivide(0)",
        "print('never')",
    )
    ended = run(notebook, "--output", tmp_path / "out.ipynb")
    assert ended.returncode == 1
    assert "before" in ended.stdout
    assert "never" not in ended.stdout
    assert "bad.ipynb: a cell failed with ZeroDivisionError" in ended.stdout
    assert ended.stderr.startswith("cell 2 of 3 failed:")
    assert "return 1 / x" in ended.stderr
    assert "\x1b" not in ended.stderr
    first, failed, never = outputs(tmp_path / "out.ipynb")
    assert first[0]["text"] == "before\n"
    assert failed[0]["ename"] == "ZeroDivisionError"
    assert never == []


def test_parameters_are_set_after_their_cell(tmp_path: Path) -> None:
    show = "print(repr((epochs, rate, name, flag, sizes)))"
    notebook = write(
        tmp_path / "p.ipynb",
        "epochs, rate = 1, 0.1\nname: str = 'a'\nflag = sizes = None",
        show,
        parameters=0,
    )
    values = ["epochs=3", "rate=1e-3", "name=resnet50", "flag=true", "sizes=[1, 2]"]
    ended = run(notebook, "--parameters", *values, "--output", tmp_path / "out.ipynb")
    assert ended.returncode == 0, ended.stderr
    assert "(3, 0.001, 'resnet50', True, [1, 2])" in ended.stdout
    written = nbformat.read(tmp_path / "out.ipynb", as_version=4)
    assert [cell.metadata.get("tags") for cell in written.cells] == [
        None,
        ["parameters"],
        ["injected-parameters"],
        None,
    ]
    nbformat.validate(written)
    again = run(tmp_path / "out.ipynb", "--parameters", "epochs=4", "--output", tmp_path / "out.ipynb")
    assert "(4, 0.1, 'a', None, None)" in again.stdout  # the previous parameters are gone


@pytest.mark.parametrize(
    ("name", "define", "call"),
    [
        ("SIGINT", LAUNCH, "notebook_launcher(train, (1, 'waits'), num_processes=2)"),
        ("SIGTERM", "import time", "print('rank 0 waits, and rank 1 waits', flush=True); time.sleep(100)"),
    ],
)
def test_a_signal_ends_the_launch_and_then_the_notebook(
    name: str, define: str, call: str, tmp_path: Path
) -> None:
    """The fixture of all tests checks that no worker is left."""
    catch = f"try:\n    {call}\nexcept KeyboardInterrupt:\n    print('caught')"
    notebook = write(tmp_path / "wait.ipynb", define, catch, "print('never')")
    program = subprocess.Popen(
        [*PROGRAM, str(notebook), "--output", str(tmp_path / "out.ipynb")], stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    with program.stdout as shown:
        wait_for(shown, "rank 0 waits", "rank 1 waits")
        os.kill(program.pid, getattr(signal, name))
        rest = shown.read()
        assert program.wait(180) == 128 + getattr(signal, name)
    assert "caught" in rest
    assert "never" not in rest
    assert f"stopped by {name}" in rest
    assert "caught" in str(outputs(tmp_path / "out.ipynb")[1])


def test_a_second_interrupt_ends_an_unresponsive_kernel(tmp_path: Path) -> None:
    unresponsive = """
import signal, time
signal.signal(signal.SIGINT, lambda *_: print("no", flush=True))
print("unresponsive", flush=True)
time.sleep(100)
"""
    program = subprocess.Popen(
        [*PROGRAM, str(write(tmp_path / "d.ipynb", unresponsive))], stdout=subprocess.PIPE, text=True
    )
    assert program.stdout is not None
    with program.stdout as shown:
        wait_for(shown, "unresponsive")
        os.kill(program.pid, signal.SIGINT)
        wait_for(shown, "no")
        os.kill(program.pid, signal.SIGINT)
        assert "stopped by SIGINT" in shown.read()
        assert program.wait(180) == 130


def test_a_kernel_that_dies_is_reported(tmp_path: Path) -> None:
    ended = run(
        write(tmp_path / "k.ipynb", "print('last words')", "import os; os._exit(3)", "print('never')")
    )
    assert ended.returncode == 1
    assert "last words" in ended.stdout
    assert "the kernel died" in ended.stdout
    assert "never" not in ended.stdout
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.ipynb"], "nothing.ipynb can't be read: No such file"),
        (["text.ipynb"], "text.ipynb is not a notebook"),
        (["plain.ipynb", "--parameters", "epochs=2"], "no cell in the notebook"),
        (
            ["tagged.ipynb", "--parameters", "epocs=2"],
            "--parameters epocs: the notebook's parameters are epochs, rate",
        ),
        (
            ["empty.ipynb", "--parameters", "epochs=2"],
            "--parameters epochs: the cell tagged `parameters` assigns no names",
        ),
        (["tagged.ipynb", "--parameters", "epochs"], "not of the form name=value"),
        (["plain.ipynb", "--output", "no/such/out.ipynb"], "--output: no such folder"),
        (["plain.ipynb", "--output", "."], "--output: . is a folder"),
        (["plain.ipynb", "--kernel", "fortran"], "no kernel named 'fortran' is installed, only "),
    ],
)
def test_wrong_use_is_one_line_and_runs_nothing(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.ipynb").write_text("this is no notebook")
    write(tmp_path / "plain.ipynb", "raise SystemError('it ran')")
    write(tmp_path / "tagged.ipynb", "epochs = 1; rate = 2", parameters=0)
    write(tmp_path / "empty.ipynb", "# no parameters yet", parameters=0)
    assert cli.main(["run-notebook", *words]) == 2
    shown = capfd.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert "it ran" not in shown.err + shown.out


def test_a_machine_without_kernels_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def no_spec(manager: KernelSpecManager, kernel_name: str) -> None:
        raise NoSuchKernel(kernel_name)

    monkeypatch.setattr(KernelSpecManager, "get_kernel_spec", no_spec)
    monkeypatch.setattr(KernelSpecManager, "find_kernel_specs", lambda manager: {})
    assert cli.main(["run-notebook", str(write(tmp_path / "a.ipynb", "1"))]) == 2
    assert (
        "no kernel is installed; install one, for example with pip install ipykernel"
        in capfd.readouterr().err
    )


def test_an_unwritable_folder_is_rejected_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "plain.ipynb", "raise SystemError('it ran')")
    monkeypatch.setattr(
        os, "access", lambda path, mode: (Path(path), mode) != (tmp_path, os.W_OK)
    )  # root may
    assert cli.main(["run-notebook", f"{tmp_path}/plain.ipynb", "--output", f"{tmp_path}/out.ipynb"]) == 2
    shown = capfd.readouterr()
    assert "writable" in shown.err
    assert "it ran" not in shown.err + shown.out


def test_missing_nbclient_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "nbclient", None)
    assert cli.main(["run-notebook", str(write(tmp_path / "a.ipynb", "1"))]) == 2
    assert 'nbclient must be installed: pip install "nblaunch[notebooks]"' in capfd.readouterr().err


def wait_for(shown: io.TextIOBase, *texts: str) -> None:
    """Read lines until each text has occurred in one."""
    missing = set(texts)
    while missing:
        line = str(shown.readline())
        assert line, f"it ended without {missing}"
        missing -= {text for text in missing if text in line}
