"""Launches from real kernels. Most tests share one kernel per module, because a launch must leave it unchanged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels import Kernel

START_METHODS = ("fork", "forkserver", "spawn")

# Remove variables of the test environment that would replace a kernel's own defaults.
INLINE_FIGURES = {"MPLBACKEND": "module://matplotlib_inline.backend_inline"}

PREAMBLE = """
import os, sys, time
import torch
from torch import nn
import nblaunch
from nblaunch import notebook_launcher
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Start a kernel for the module, with torch and the launcher imported and a separate log folder."""
    log_dir = tmp_path_factory.mktemp("logs")
    with Kernel.start(env=INLINE_FIGURES | {"NBLAUNCH_LOG_DIR": str(log_dir)}) as kernel:
        kernel.run(PREAMBLE)
        yield kernel


@pytest.fixture
def fresh(nothing_left_behind: None, tmp_path: Path) -> Iterator[Kernel]:
    """Start a separate kernel, for tests that change a kernel permanently."""
    with Kernel.start(env=INLINE_FIGURES | {"NBLAUNCH_LOG_DIR": str(tmp_path / "logs")}) as kernel:
        kernel.run(PREAMBLE)
        yield kernel
