"""XLA workers that the system ends (PJRT CPU): the error names the signal, and memory if that was the cause."""

from __future__ import annotations

import pytest

from tests.control_groups import control_group
from tests.kernels import Kernel
from tests.xla.conftest import StartKernel

pytestmark = [pytest.mark.usefixtures("compile_quickly")]


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGKILL"])
def test_a_signal_is_named(shared: Kernel, name: str) -> None:
    cell = shared.run(
        f"""
def die(model):
    accelerator = Accelerator()
    model = accelerator.prepare(model)
    model(torch.ones(2, 3, device=accelerator.device)).sum().item()
    accelerator.wait_for_everyone()
    if accelerator.process_index == 1:
        os.kill(os.getpid(), signal.{name})
    accelerator.wait_for_everyone()
notebook_launcher(die, (nn.Linear(3, 2),), num_processes=2)
""",
        raises="WorkerDied",
    )
    assert f"was killed by {name}" in cell.raised.value
    assert "memory" in cell.raised.value
    assert shared.processes() == []
    cell = shared.run("notebook_launcher(lambda: Accelerator().num_processes, num_processes=2)")
    assert cell.value == 2


def test_memory_that_runs_out_is_named(start_xla: StartKernel) -> None:
    """Every worker builds its own model of 400 MB, in a control group with 1.5 GB: the system kills one of them."""
    with control_group("memory") as group, start_xla() as kernel:
        kernel.run("from nblaunch.backends.xla import BACKEND; BACKEND.prepare_launcher()")
        group.add(kernel.pid)
        group.limit.write_text("1500000000")
        cell = kernel.run(
            """
def build_in_function():
    accelerator = Accelerator()
    model = nn.Sequential(*(nn.Linear(2560, 2560) for _ in range(16)))
    model = accelerator.prepare(model)
    accelerator.wait_for_everyone()
notebook_launcher(build_in_function, num_processes=8)
""",
            raises="WorkerDied",
        )
        assert "SIGKILL" in cell.raised.value
        assert "memory" in cell.raised.value
        assert "(model,)" in cell.raised.value, "the way out: build it once and pass it"
        assert kernel.processes() == []
        assert kernel.run("1 + 1").value == 2, "the kernel lives on"
