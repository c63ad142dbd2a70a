"""Collectives that ranks call differently: explained, with the ranks at fault; odd programs that are right: no message.

All mismatches are run by ``make bench ARGS=mismatches``, some of each kind here.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.failures.mismatches import MISMATCHES, PREAMBLE, Mismatch
from tests.failures.right_programs import RIGHT_PROGRAMS, RightProgram
from tests.kernels import Kernel

HERE = (
    "another kind",
    "a smaller all_reduce",
    "two ranks with two sizes",
    "integers of the same size",
    "half with bfloat16, at the end",
    "sum with max",
    "gather to another root",
    "another group",
    "a function left early",
    "the main process alone",
    "the main process alone, of two",
    "splits that do not fit",
    "DDP: one batch fewer, then a barrier",
    "DDP: another dtype",
    "DDP: no_sync on one rank",
    "DDP: another learning rate",
    "Accelerator: gather of another size",
    "Accelerator: gather under is_main_process",
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
    cell = kernel.submit(launch_of(mismatch, on_hang="stop")).wait(40)
    assert cell.error is not None, cell.describe()
    explanation = kernel.run(EXPLANATION, store_history=False).stdout
    assert not mismatch.problems(explanation, cell.shown), cell.describe()


@pytest.mark.parametrize("program", RIGHT_PROGRAMS, ids=lambda program: program.name)
def test_a_right_program_gets_no_message(kernel: Kernel, program: RightProgram) -> None:
    kernel.run(program.source)
    cell = kernel.run(
        f"notebook_launcher(train, num_processes={program.num_ranks}, hang_timeout_s=15, on_hang='stop')"
    )
    assert cell.result == "'right'"
    assert "very rank" not in cell.shown, "no advice is given"
    assert "collective " not in cell.shown


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_fresh_interpreters_are_compared_too(kernel: Kernel, method: str) -> None:
    mismatch = next(one for one in MISMATCHES if one.name == "sum with max")
    kernel.run(mismatch.source)
    cell = kernel.submit(launch_of(mismatch, start_method=method)).wait(60)
    assert cell.raised.name == "CollectiveMismatch"
    assert not mismatch.problems(kernel.run(EXPLANATION, store_history=False).stdout, cell.shown)
