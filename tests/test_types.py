"""Type checkers know the return types and the settings of launches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_readme import PYTHON

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_mypy_types_launches_and_readme_example(tmp_path: Path) -> None:
    example = tmp_path / "readme.py"
    # In the file, not as options, with which mypy would not use the results of `make lint` about other files.
    relaxed = "# mypy: allow-untyped-defs, allow-incomplete-defs\n"
    example.write_text(relaxed + PYTHON[0], encoding="utf-8")
    settings = ["--config-file", ROOT / "pyproject.toml"]
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", *settings, ROOT / "tests" / "types_of_launches.py", example],
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
