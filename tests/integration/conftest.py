"""Launches from real kernels. Most tests share one kernel per module: a launch must leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels import Kernel

START_METHODS = ("fork", "forkserver", "spawn")

# What a kernel sets by itself unless the environment that the tests run in says otherwise.
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
    """A kernel of the module with torch and the launcher imported; its logs lie in a folder of their own."""
    log_dir = tmp_path_factory.mktemp("logs")
    with Kernel.start(env=INLINE_FIGURES | {"NBLAUNCH_LOG_DIR": str(log_dir)}) as kernel:
        kernel.run(PREAMBLE)
        yield kernel


@pytest.fixture
def fresh(nothing_left_behind: None, tmp_path: Path) -> Iterator[Kernel]:
    """A kernel of the test's own, for what changes a kernel for good."""
    with Kernel.start(env=INLINE_FIGURES | {"NBLAUNCH_LOG_DIR": str(tmp_path / "logs")}) as kernel:
        kernel.run(PREAMBLE)
        yield kernel
