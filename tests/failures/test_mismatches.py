"""Mismatched collectives are explained, with the ranks at fault; correct programs that look odd get no message.

``make bench ARGS=mismatches`` runs all mismatches; these tests run some of each kind.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.alarms import noted, undeclared
from tests.failures.mismatches import MISMATCHES, PREAMBLE, Mismatch
from tests.failures.right_programs import RIGHT_PROGRAMS, RightProgram
from tests.kernels import Kernel
from tests.thorough import thorough

HERE = (
    "another kind",
    "a smaller all_reduce",
    "two ranks with two sizes",
    "integers of the same size",
    "half with bfloat16, at the end",
    "sum with max",
    "gather to another root",
    "another group",
    "a group that one member does not make",
    "transfers in a ring, of which one is missing",
    "a function left early",
    "the main process alone",
    "the main process alone, of two",
    "splits that do not fit",
    "DDP: one batch fewer, then a barrier",
    "DDP: another dtype",
    "DDP: no_sync on one rank",
    "DDP: two models in another order",
    "DDP: a reduction of one rank in a helper",
    "DDP: another learning rate",
    "Accelerator: gather of another size",
    "Accelerator: gather under is_main_process",
    "Accelerator: objects where others gather tensors",
    "FSDP2: one batch fewer",
)

EXPLANATION = """
error = nblaunch.last_job().exception()
print("\\n".join([str(error), *getattr(error, "__notes__", [])]))
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with Kernel.start(env={"NBLAUNCH_LOG_DIR": str(tmp_path_factory.mktemp("logs"))}) as one:
        one.run(PREAMBLE)
        yield one


def launch_of(mismatch: Mismatch, **options: object) -> str:
    named = "".join(f", {name}={value!r}" for name, value in options.items())
    return f"notebook_launcher(train, num_processes={mismatch.num_ranks}, hang_timeout_s=4, interrupt_grace_s=1{named})"


@pytest.mark.parametrize("name", HERE)
def test_a_mismatch_is_explained(kernel: Kernel, name: str) -> None:
    mismatch = next(one for one in MISMATCHES if one.name == name)
    kernel.run(mismatch.source)
    cell = kernel.submit(launch_of(mismatch, on_hang="stop")).wait()
    assert cell.error is not None, cell.describe()
    explanation = kernel.run(EXPLANATION, store_history=False).stdout
    assert not mismatch.problems(explanation, cell.shown), cell.describe()
    calls_differ = re.search(r"^collective \d+: ", explanation, re.MULTILINE)
    assert cell.raised.name == "CollectiveMismatch" or not calls_differ, cell.describe()


@pytest.mark.parametrize("program", RIGHT_PROGRAMS, ids=lambda program: program.name)
def test_correct_programs_get_no_message(kernel: Kernel, program: RightProgram) -> None:
    kernel.run(program.source)
    with noted() as notes:
        cell = kernel.run(
            f"notebook_launcher(train, num_processes={program.num_ranks}, hang_timeout_s=15, on_hang='stop')"
        )
    assert cell.result == "'right'"
    assert not undeclared(notes)
    assert "very rank" not in cell.shown, "no advice is given"
    assert "collective " not in cell.shown


@pytest.mark.parametrize("method", ["forkserver", thorough("spawn")])
def test_fresh_interpreters_are_compared_too(kernel: Kernel, method: str) -> None:
    mismatch = next(one for one in MISMATCHES if one.name == "sum with max")
    kernel.run(mismatch.source)
    cell = kernel.submit(launch_of(mismatch, start_method=method)).wait()
    assert cell.raised.name == "CollectiveMismatch"
    assert not mismatch.problems(kernel.run(EXPLANATION, store_history=False).stdout, cell.shown)


def test_an_interrupt_names_what_ranks_waited_for(kernel: Kernel) -> None:
    kernel.run("""
def train():
    dist.init_process_group()
    dist.barrier()
    if rank() == 2:
        time.sleep(3600)
    dist.all_reduce(torch.ones(4))
""")
    cell = kernel.submit("notebook_launcher(train, num_processes=3, interrupt_grace_s=1, hang_timeout_s=4)")
    cell.wait_for(lambda cell: "rank 2 has not arrived" in cell.shown, 180, "the report of the hang")
    kernel.interrupt()
    assert cell.wait().raised.name == "KeyboardInterrupt"
    assert "interrupted while ranks were waiting: rank 2 has called nothing since barrier" in cell.shown


@pytest.mark.parametrize(
    ("check", "name"),
    [
        ("collectives_differ", "half with bfloat16, at the end"),
        ("learning_rates_differ", "DDP: another learning rate"),
    ],
)
def test_checks_can_be_disabled(kernel: Kernel, check: str, name: str) -> None:
    mismatch = next(one for one in MISMATCHES if one.name == name)
    kernel.run(mismatch.source)
    kernel.run(f"os.environ['NBLAUNCH_CHECKS'] = '-{check}'")
    try:
        kernel.run(launch_of(mismatch))
    finally:
        kernel.run("del os.environ['NBLAUNCH_CHECKS']")


def test_a_session_warns_and_continues(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run("session = nblaunch.Session(3)")
    try:
        kernel.run("""
def join():
    import nblaunch
    nblaunch.Accelerator(cpu=True).wait_for_everyone()
def differ(gate):
    import os, time, torch, torch.distributed as dist
    dist.all_reduce(torch.ones(4, dtype=torch.int32 if dist.get_rank() == 1 else torch.float32))
    while not os.path.exists(gate):
        time.sleep(0.01)
session.run(join)
""")
        gate = tmp_path / "gate"
        cell = kernel.submit(f"session.run(differ, ({str(gate)!r},))")
        cell.wait_for(lambda cell: "rank 1 all_reduce int32[4]" in cell.shown, 180, "the warning")
        gate.touch()
        assert cell.wait().error is None
    finally:
        kernel.run("session.close()")
