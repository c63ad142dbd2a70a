"""Kernels that compute on XLA devices: PJRT CPU with the real torch_xla, without a TPU.

The tests are collected only if torch_xla can be imported, as in the environment of ``make test-xla``.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.kernels import Kernel

if importlib.util.find_spec("torch_xla") is None:
    collect_ignore_glob = ["test_*.py"]

PREAMBLE = """
import copy, os, signal, sys, time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from nblaunch import Accelerator, last_job, notebook_launcher, set_seed

get_ipython().history_manager.enabled = False

def is_initialised():
    xla = sys.modules.get("torch_xla")
    return xla is not None and xla._XLAC._xla_runtime_is_initialized()

def metrics():
    import torch_xla.debug.metrics
    return torch_xla.debug.metrics
"""

# The last flag saves the passes of MLIR for each graph.
COMPILE_QUICKLY = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_max_isa=SSE4_2 "
    "--xla_cpu_use_fusion_emitters=false"
)

StartKernel = Callable[..., Kernel]


def pytest_report_header() -> str:
    """Label the results of these tests."""
    if importlib.util.find_spec("torch_xla") is None:
        return "tests/xla: left out, torch_xla is not installed; make test-xla runs them"
    import torch
    import torch_xla

    return f"tests/xla: PJRT CPU, torch {torch.__version__}, torch_xla {torch_xla.__version__}"


@pytest.fixture(scope="module")
def compile_quickly() -> Iterator[None]:
    """Make kernels of this file compile without optimisation; existing flags take precedence.

    It is for files that test which graphs are compiled and their results, not their speed: compiling takes most of
    their processor time.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", f"{COMPILE_QUICKLY} {os.environ.get('XLA_FLAGS', '')}".strip())
        yield


@contextmanager
def xla_kernel(logs: Path, **env: str) -> Iterator[Kernel]:
    """Start a kernel and run the preamble in it; ``env``: variables in addition to PJRT CPU's, or in place of them."""
    variables = {"NBLAUNCH_LOG_DIR": str(logs), "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1", **env}
    with Kernel.start(env=variables) as kernel:
        kernel.run(PREAMBLE)
        yield kernel


@pytest.fixture
def start_xla(tmp_path: Path) -> Iterator[StartKernel]:
    """Return a function that starts a kernel for one test: ``start_xla(PJRT_DEVICE="CPU")``. Kernels are closed in
    reverse order.
    """
    with ExitStack() as stack:
        yield lambda **env: stack.enter_context(xla_kernel(tmp_path / "logs", **env))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Start one kernel for all tests of a file."""
    with xla_kernel(tmp_path_factory.mktemp("logs")) as kernel:
        yield kernel
