"""What a user sees of ``python train.py`` when a worker fails: their own lines once, and last the one that failed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import {imported}
def helper(number):
    raise {raised}
def train():
    helper(3)
def main():
    {call}
if __name__ == "__main__":
    main()
"""

CALLS = {
    "notebook_launcher": ("nblaunch", "nblaunch.notebook_launcher(train, (), 2)"),
    "launch": ("nblaunch", "nblaunch.launch(train, num_processes=2)"),
    "background": ("nblaunch", "nblaunch.notebook_launcher(train, (), 2, background=True).result()"),
}


def run(tmp_path: Path, name: str, raised: str = 'ValueError("the loss is nan")') -> list[str]:
    imported, call = CALLS[name]
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(imported=imported, call=call, raised=raised))
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=90, check=False
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    _, _, shown = ended.stderr.partition("Traceback (most recent call last):\n")
    assert shown, ended.stderr
    return shown.splitlines()


@pytest.mark.parametrize("name", CALLS)
def test_lines_are_shown_once_and_the_one_that_failed_last(tmp_path: Path, name: str) -> None:
    lines = run(tmp_path, name)
    end = lines.index("ValueError: the loss is nan")
    shown = [line.strip() for line in lines[:end] if not set(line) <= set(" ^~")]
    assert [line for line in shown if not line.startswith("File ")] == [
        "main()",
        CALLS[name][1],
        "helper(3)",
        'raise ValueError("the loss is nan")',
    ]
    assert [line.rpartition(" in ")[2] for line in shown if line.startswith("File ")] == [
        "<module>",
        "main",
        "train",
        "helper",
    ]
    assert not any("/nblaunch/" in line for line in shown), lines


@pytest.mark.parametrize("raised", ['SyntaxError("bad", ("model.py", 3, 1, "x = = 3"))', "KeyError(3)"])
def test_any_kind_of_error_is(tmp_path: Path, raised: str) -> None:
    lines = run(tmp_path, "notebook_launcher", raised)
    assert sum("helper(3)" in line for line in lines) == 1, lines
    assert not any("/nblaunch/" in line for line in lines), lines
