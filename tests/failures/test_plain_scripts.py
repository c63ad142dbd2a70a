"""The output of ``python train.py`` when a worker fails: the user's lines once, the failed line last."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import nblaunch
def helper(number):
    raise {raised}
def train():
    helper(3)
def main():
    {call}
if __name__ == "__main__":
    main()
"""

# Call -> the exception of helper(), and Python's last line about it.
CALLS = {
    "nblaunch.notebook_launcher(train, (), 2)": (
        'ValueError("the loss is nan")',
        "ValueError: the loss is nan",
    ),
    "nblaunch.launch(train, num_processes=2)": ("KeyError(3)", "KeyError: 3"),
    "nblaunch.notebook_launcher(train, (), 2, background=True).result()": ('OSError("no")', "OSError: no"),
}


def run(tmp_path: Path, call: str, raised: str) -> list[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(call=call, raised=raised))
    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    _, _, shown = ended.stderr.partition("Traceback (most recent call last):\n")
    assert shown, ended.stderr
    return shown.splitlines()


@pytest.mark.parametrize("call", CALLS)
def test_the_failing_line_is_shown_last(tmp_path: Path, call: str) -> None:
    raised, last = CALLS[call]
    lines = run(tmp_path, call, raised)
    end = lines.index(last)
    shown = [line.strip() for line in lines[:end] if not set(line) <= set(" ^~")]
    assert [line for line in shown if not line.startswith("File ")] == [
        "main()",
        call,
        "helper(3)",
        f"raise {raised}",
    ]
    assert [line.rpartition(" in ")[2] for line in shown if line.startswith("File ")] == [
        "<module>",
        "main",
        "train",
        "helper",
    ]
    assert not any("/nblaunch/" in line for line in shown), lines


def test_syntax_errors_show_user_lines(tmp_path: Path) -> None:
    lines = run(tmp_path, next(iter(CALLS)), 'SyntaxError("bad", ("model.py", 3, 1, "x = = 3"))')
    assert sum("helper(3)" in line for line in lines) == 1, lines
    assert not any("/nblaunch/" in line for line in lines), lines
