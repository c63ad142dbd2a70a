"""Launches with the TorchTPU backend from a real kernel, with a stub of torch_tpu and simulated chips.

The last test imports the package in the kernel, which the other tests must not find there.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import fake_torch_tpu
from tests.kernels import Kernel

CHIPS = """
import os, sys
from collections import Counter
from nblaunch.host import tpu
tpu.chips = tpu.vfio_chips = lambda: Counter(v5e=4)
tpu.lock_holder = lambda: None
os.environ.update(TPU_SKIP_MDS_QUERY="1", TPU_ACCELERATOR_TYPE="v5litepod-4", TPU_WORKER_HOSTNAMES="localhost")
import torch
from nblaunch import Accelerator, last_job, notebook_launcher

def train(model):
    import torch_tpu
    accelerator = Accelerator()
    ranks = accelerator.gather_object([accelerator.process_index])
    kinds = torch.distributed.get_backend_config()
    import_by_parent = torch_tpu.IMPORTED_BY == os.getppid()
    return os.environ["TPU_VISIBLE_CHIPS"], str(accelerator.device), ranks, kinds, import_by_parent, os.getppid()
"""

# A user's module that takes the chips when one of its objects is loaded.
SEEDING = """
class Early:
    def __setstate__(self, state):
        from torch_tpu._internal.device import _device_ops_backend
        _device_ops_backend.is_taken = True
    def __getstate__(self):
        return {"a": 1}
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Start a kernel on a simulated host with four chips."""
    packages = tmp_path_factory.mktemp("packages")
    path = fake_torch_tpu.write(packages)
    (packages / "seeding.py").write_text(SEEDING)
    logs = str(tmp_path_factory.mktemp("logs"))
    with Kernel.start(env={"NBLAUNCH_LOG_DIR": logs, "PYTHONPATH": path}) as kernel:
        kernel.run(CHIPS)
        yield kernel


@pytest.mark.thorough
def test_workers_share_one_import_and_model(kernel: Kernel) -> None:
    """A seed and a backward() ran in the kernel before; with torch_tpu imported, they would have taken the chips."""
    kernel.run("torch.manual_seed(0); torch.ones(2, requires_grad=True).sum().backward()")
    for _ in range(2):
        cell = kernel.run(
            "found = notebook_launcher(train, (torch.nn.Linear(2, 2),), return_all=True, dashboard='text')\n"
            "plan = last_job().plan\n"
            "found, 'torch_tpu' in sys.modules, plan.backend.name, plan.start_method",
        )
        workers, is_in_kernel, *plan = cell.value
        assert plan == ["torch_tpu", "forkserver"]
        assert [chip for chip, *_ in workers] == list("0123")
        assert {(device, tuple(ranks), kinds) for _, device, ranks, kinds, *_ in workers} == {
            ("tpu:0", (0, 1, 2, 3), "cpu:gloo,tpu:tpu_dist")
        }
        assert all(by_parent for *_, by_parent, _ in workers)
        assert len({parent for *_, parent in workers}) == 1
        assert not is_in_kernel
        assert "the runtime was shut down" not in cell.stdout, (
            "its barrier at the end would wait for the dead"
        )
        assert "workers start from" not in cell.stdout


@pytest.mark.thorough
def test_a_module_that_takes_the_chips_when_it_is_loaded_is_found(kernel: Kernel) -> None:
    cell = kernel.run(
        "import seeding\nearly = seeding.Early()\nnotebook_launcher(lambda it: 1, (early,), dashboard='none')",
        raises="LaunchError",
    )
    assert "a module uses the device" in cell.raised.text


def test_libtpu_aborts_show_their_reason(kernel: Kernel) -> None:
    cell = kernel.run(
        """
def abort():
    os.write(2, b"F0000 00:00:1 5309 compilation.cc:533] Check failed: context.ok() Failed to create default "
        b"compilation context: TPU initialization failed: No jellyfish device found.\\n*** Check failure stack "
        b"trace: ***\\n    @     0x7f1cefcb1974  absl::" b"LogMessage()\\n")
    os.abort()
notebook_launcher(abort, dashboard="none")
""",
        raises="WorkerDied",
    )
    assert "TPU initialization failed: No jellyfish device found" in cell.raised.text
    assert "compilation.cc:533] Check failed" in cell.raised.text
    assert "absl::LogMessage" not in cell.raised.text


@pytest.mark.thorough
def test_kernel_with_torch_tpu_can_launch_before_using_chips(kernel: Kernel) -> None:
    """One import serves all workers there, too, although torch_tpu has permanently enabled its import by torch."""
    kernel.run("import torch_tpu; assert os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] == '1'")
    cell = kernel.run("found = notebook_launcher(train, (None,), return_all=True, dashboard='text')\nfound")
    assert [by_parent for *_, by_parent, _ in cell.value] == [True] * 4
    assert "Import nblaunch before torch" in cell.stdout
    cell = kernel.run("torch.manual_seed(0); notebook_launcher(lambda: 1)", raises="LaunchError")
    assert "restart the kernel" in cell.raised.text
