"""Functions that return as soon as processes have joined: a rank that leaves does not disturb ranks that still join."""

from __future__ import annotations

import pytest

from tests.kernels import Kernel
from tests.thorough import thorough

CELL = """
import torch
import torch.distributed as dist
from nblaunch import Accelerator, notebook_launcher

def join():
    dist.init_process_group("gloo")
    return dist.get_rank()

def build():
    return Accelerator().process_index

def group_all():
    dist.init_process_group("gloo")
    dist.new_group([0, 1, 2, 3])
    dist.new_group([2, 3])
    return dist.get_rank()

def group_members():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank % 2:
        total = torch.tensor(rank)
        dist.all_reduce(total, group=dist.new_group([1, 3]))
        assert total == 4
    return rank

def launch(function, times):
    again = (notebook_launcher(function, (), 4, backend="cpu", dashboard="none", return_all=True) for _ in range(times))
    return {str(found) for found in again}
"""


@pytest.mark.parametrize("function", ["join", thorough("build"), "group_all"])
def test_a_function_may_return_right_after_joining(shared: Kernel, function: str) -> None:
    shared.run(CELL)
    assert shared.run(f"launch({function}, 12)").value == {"[0, 1, 2, 3]"}


def test_only_members_need_to_form_a_group(shared: Kernel) -> None:
    shared.run(CELL)
    assert shared.run("launch(group_members, 3)").value == {"[0, 1, 2, 3]"}
