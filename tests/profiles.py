"""The two kinds of kernels for notebooks: with the newest Jupyter packages, and with Google Colab's.

@pytest.mark.parametrize("profile", PROFILES)
def test_something(profile: str) -> None:
    with Kernel.start(python=python_of(profile)) as kernel: ...
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NoReturn

import pytest

PROFILES = ("newest", "colab")
_COLAB = Path(__file__).parents[1] / ".venv-colab-kernel" / "bin" / "python"


def python_of(profile: str) -> str:
    """Return the interpreter for this kind of kernels. If it was never created, skip the test, except in CI."""
    if profile == "newest":
        return sys.executable
    if not _COLAB.exists():
        missing(f"{_COLAB} is missing: `make colab-env` makes it")
    return str(_COLAB)


def missing(reason: str) -> NoReturn:
    """End a test whose environment was never created: skip it, or fail it in CI."""
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
