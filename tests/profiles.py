"""The two kinds of kernels that notebooks meet: the newest Jupyter packages, and those of Google Colab.

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
    """The interpreter whose kernels are of this kind. Where it was never made, the test is skipped, but not in CI."""
    if profile == "newest":
        return sys.executable
    if not _COLAB.exists():
        missing(f"{_COLAB} is missing: `make colab-env` makes it")
    return str(_COLAB)


def missing(reason: str) -> NoReturn:
    """End a test whose environment was never made: skipped, but in CI failed."""
    if os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
