"""Collectives that ranks of different nodes call differently are explained as on one machine."""

from __future__ import annotations

import pytest

from tests.failures.mismatches import MISMATCHES, PREAMBLE
from tests.kernels import Kernel

HERE = ("a barrier instead", "a smaller all_reduce")
AMONG_THREE = ("another kind", "sum with max", "DDP: another learning rate")
EXPLANATION = """
error = nblaunch.last_job().exception()
print("\\n".join([str(error), *getattr(error, "__notes__", [])]))
"""


def check(notebook: Kernel, name: str, num_nodes: int) -> None:
    mismatch = next(one for one in MISMATCHES if one.name == name)
    notebook.run(PREAMBLE)
    notebook.run(mismatch.source)
    cell = notebook.submit(
        f"notebook_launcher(train, num_processes={mismatch.num_ranks}, num_nodes={num_nodes}, engine=engine, "
        "on_hang='stop', hang_timeout_s=20, interrupt_grace_s=1)"
    ).wait(180)
    assert cell.error is not None, cell.describe()
    explanation = notebook.run(EXPLANATION, store_history=False).stdout
    assert not mismatch.problems(explanation, cell.shown), cell.describe()


@pytest.mark.parametrize("name", HERE)
def test_a_mismatch_between_nodes_is_explained(kept: Kernel, name: str) -> None:
    check(kept, name, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("name", AMONG_THREE)
def test_a_mismatch_among_three_nodes_is_explained(notebook: Kernel, name: str) -> None:
    check(notebook, name, 3)


def test_a_mismatch_that_hangs_nothing_ends_the_job(kept: Kernel) -> None:
    kept.run("""
def train():
    dist.init_process_group("gloo")
    for step in range(10**9):
        dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if rank() == 3 and step >= 20 else dist.ReduceOp.SUM)
        time.sleep(0.002)
""")
    cell = kept.submit("launch(train)").wait()
    assert cell.raised.name == "CollectiveMismatch"
    assert "collective 21: rank 3 all_reduce float32[4] MAX" in cell.raised.value
    assert "ranks 0-2 all_reduce float32[4] SUM" in cell.raised.value


def test_an_interrupt_names_what_ranks_of_other_nodes_waited_for(kept: Kernel) -> None:
    kept.run("""
def train():
    dist.init_process_group("gloo")
    dist.barrier()
    if rank() == 2:
        time.sleep(3600)
    dist.all_reduce(torch.ones(4))
""")
    cell = kept.submit("launch(train, hang_timeout_s=4)")
    cell.wait_for(lambda cell: "rank 2 has not arrived" in cell.shown, 180, "the report of the hang")
    kept.interrupt()
    assert cell.wait().raised.name == "KeyboardInterrupt"
    assert "interrupted while ranks were waiting: rank 2 has called nothing since barrier" in cell.shown
