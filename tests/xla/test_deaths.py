"""XLA workers that the system ends (PJRT CPU): the signal is named, and memory where it was memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernels import Kernel
from tests.xla.conftest import StartKernel

pytestmark = [pytest.mark.timeout(100), pytest.mark.usefixtures("compile_quickly")]

CGROUP = Path("/sys/fs/cgroup")


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
        timeout_s=60,
    )
    assert f"was killed by {name}" in cell.raised.value
    assert "memory" in cell.raised.value
    assert shared.processes() == []
    cell = shared.run("notebook_launcher(lambda: Accelerator().num_processes, num_processes=2)", timeout_s=40)
    assert cell.value == 2


@pytest.fixture
def memory_group() -> Iterator[Path]:
    """A control group that limits memory."""
    for folder in (CGROUP / "memory" / f"nblaunch-xla-{os.getpid()}", CGROUP / f"nblaunch-xla-{os.getpid()}"):
        try:
            folder.mkdir()
        except OSError:
            continue
        if any((folder / limit).exists() for limit in ("memory.max", "memory.limit_in_bytes")):
            yield folder
            folder.rmdir()
            return
        folder.rmdir()
    pytest.skip("no control group with a limit on memory can be made here")


def limit(group: Path, num_bytes: int) -> None:
    name = "memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes"
    (group / name).write_text(str(num_bytes))


def test_memory_that_runs_out_is_named(memory_group: Path, start_xla: StartKernel) -> None:
    """Every worker builds a model of 400 MB for itself, in a group of 1.5 GB: the system kills one of them."""
    kernel = start_xla()
    try:
        kernel.run("from nblaunch.backends.xla import BACKEND; BACKEND.prepare_launcher()", timeout_s=40)
        (memory_group / "cgroup.procs").write_text(str(kernel.pid))
        limit(memory_group, 1_500_000_000)
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
            timeout_s=80,
        )
        print(cell.raised.value)
        assert "SIGKILL" in cell.raised.value
        assert "memory" in cell.raised.value
        assert "(model,)" in cell.raised.value, "the way out: build it once and pass it"
        assert kernel.processes() == []
        cell = kernel.run("1 + 1")
        assert cell.value == 2, "the kernel lives on"
    finally:
        kernel.close()
        kernel.process.wait(5)
