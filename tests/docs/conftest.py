"""The documentation's site, built once for all its tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.architecture.source import ROOT

BUILD_S = 1500.0
"""Time limit of a build: it takes 20 s on an idle core, and many times longer while the rest of the suite runs."""


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as ``make docs`` does."""
    target = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "-c", "docs", ".", target],
        cwd=ROOT, capture_output=True, text=True, timeout=BUILD_S,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    return target
