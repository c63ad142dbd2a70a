"""Functions that return as soon as processes are joined: a rank that leaves disturbs none that still joins."""

from __future__ import annotations

import pytest

from tests.kernels import Kernel

CELL = """
import torch.distributed as dist
from nblaunch import Accelerator, notebook_launcher

def join():
    dist.init_process_group("gloo")
    return dist.get_rank()

def build():
    return Accelerator().process_index

def launch(function, times):
    again = (notebook_launcher(function, (), 4, backend="cpu", dashboard="none", return_all=True) for _ in range(times))
    return {str(found) for found in again}
"""


@pytest.mark.parametrize("function", ["join", "build"])
def test_a_function_may_return_as_soon_as_it_has_joined(shared: Kernel, function: str) -> None:
    shared.run(CELL)
    assert shared.run(f"launch({function}, 12)").value == {"[0, 1, 2, 3]"}
