"""Kernels that compute on XLA devices. All of it is PJRT CPU with the real torch_xla: no test here has seen a TPU.

Collected only where torch_xla can be imported, which is the environment that ``make test-xla`` makes.
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

# The last one saves each graph the passes of MLIR.
COMPILE_QUICKLY = (
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_max_isa=SSE4_2 "
    "--xla_cpu_use_fusion_emitters=false"
)

StartKernel = Callable[..., Kernel]


def pytest_report_header() -> str:
    """Labels what these tests show."""
    if importlib.util.find_spec("torch_xla") is None:
        return "tests/xla: left out, torch_xla is not installed; make test-xla runs them"
    import torch
    import torch_xla

    return f"tests/xla: PJRT CPU, torch {torch.__version__}, torch_xla {torch_xla.__version__}"


@pytest.fixture(scope="module")
def compile_quickly() -> Iterator[None]:
    """Kernels of this file compile without optimising; flags that were set are kept, and win.

    For files that look at which graphs are compiled and at what they compute, not at how fast: compiling is most of
    their processor time.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", f"{COMPILE_QUICKLY} {os.environ.get('XLA_FLAGS', '')}".strip())
        yield


@contextmanager
def xla_kernel(logs: Path, **env: str) -> Iterator[Kernel]:
    """A kernel that has run the preamble; ``env``: variables besides those of PJRT CPU, or in place of them."""
    variables = {"NBLAUNCH_LOG_DIR": str(logs), "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1", **env}
    with Kernel.start(env=variables) as kernel:
        kernel.run(PREAMBLE)
        yield kernel


@pytest.fixture
def start_xla(tmp_path: Path) -> Iterator[StartKernel]:
    """Starts a kernel for the test's own use: ``start_xla(PJRT_DEVICE="CPU")``. Several are closed in reverse."""
    with ExitStack() as stack:
        yield lambda **env: stack.enter_context(xla_kernel(tmp_path / "logs", **env))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """One kernel for all tests of a file."""
    with xla_kernel(tmp_path_factory.mktemp("logs")) as kernel:
        yield kernel
