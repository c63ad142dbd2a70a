"""Eight workers of a v5e host without chips: everything runs as on a real host until libtpu searches for its chip."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nblaunch.backends.torch_tpu import BACKEND, MESHES
from nblaunch.host import tpu
from tests.kernels import Kernel

pytestmark = pytest.mark.timeout(300)

MODEL_MB = 200
MOST_MB = 40
"""Memory that a worker may use beyond the model when libtpu has found no chip."""

PREAMBLE = f"""
import atexit, os, sys, time
from nblaunch import Accelerator, last_job, notebook_launcher
import torch

model = torch.nn.Linear({MODEL_MB * 250}, 1000, bias=False)
assert sum(p.numel() * 4 for p in model.parameters()) == {MODEL_MB}_000_000

def private_mb():
    with open("/proc/self/smaps_rollup") as file:
        fields = [line.split() for line in file]
    return sum(int(one[1]) for one in fields if one[0] in ("Private_Clean:", "Private_Dirty:")) / 1000

def reach_libtpu(model):
    os.environ.update(TPU_STDERR_LOG_LEVEL="0", TPU_MIN_LOG_LEVEL="0")
    before = private_mb()
    from torch_tpu._internal.device._device_module import TpuDeviceModule
    num_exit_handlers = atexit._ncallbacks()
    atexit.unregister(TpuDeviceModule._shutdown_runtime)
    is_dropped = num_exit_handlers == atexit._ncallbacks()
    try:
        accelerator = Accelerator(mixed_precision="bf16")
    except RuntimeError as error:
        return time.time() - begun, before, private_mb(), is_dropped, os.getppid(), str(error)

def join(model):
    Accelerator()

def compute(model):
    torch.zeros(2, device="tpu")
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Start a kernel on that host and run a seed and a backward(), which would end a kernel with torch_tpu imported."""
    env = {
        "NBLAUNCH_LOG_DIR": str(tmp_path_factory.mktemp("logs")),
        "PYTHONPATH": str(Path(__file__).with_name("eight_chips")),
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    }
    with Kernel.start(env=env, is_new=True) as kernel:
        kernel.run(PREAMBLE)
        kernel.run("torch.manual_seed(0); torch.ones(2, requires_grad=True).sum().backward()")
        yield kernel
        assert kernel.run("'torch_tpu' in sys.modules").value is False


def test_eight_workers_reach_libtpu_with_one_chip_each(kernel: Kernel) -> None:
    cell = kernel.run(
        "begun = time.time()\n"
        "found = notebook_launcher(reach_libtpu, (model,), return_all=True, dashboard='text')\n"
        "job = last_job()\n"
        "logs = [job.logs(rank) for rank in range(8)]\n"
        "found, logs, job.plan.backend.name, job.plan.start_method",
        timeout_s=250,
    )
    found, logs, *plan = cell.value
    assert plan == ["torch_tpu", "forkserver"]
    assert len(found) == 8
    for rank, (_, before, after, is_dropped, _, error) in enumerate(found):
        assert "TPU initialization failed: No jellyfish device found" in error
        assert re.findall(r"--deepsea_hal_included_devs=(\d+)'", logs[rank]) == [str(rank)]
        assert "Found 0 UNKNOWN chips" in logs[rank]
        assert max(before, after) < MOST_MB
        assert is_dropped
    assert len({parent for *_, parent, _ in found}) == 1
    seconds, before, after = ([one[position] for one in found] for position in range(3))
    print(
        f"\nlibtpu was reached within {max(seconds):.1f} s of the launch; each worker had {max(before):.0f} MB of "
        f"its own before and {max(after):.0f} MB after, beside a model of {MODEL_MB} MB"
    )


def test_joining_says_that_there_is_no_tpu(kernel: Kernel) -> None:
    cell = kernel.run(
        "notebook_launcher(join, (model,), dashboard='none')", raises="RuntimeError", timeout_s=250
    )
    assert "TPU initialization failed: No jellyfish device found" in cell.raised.text


def test_libtpu_aborts_are_reported(kernel: Kernel) -> None:
    cell = kernel.run(
        "notebook_launcher(compute, (model,), 1, dashboard='none')", raises="WorkerDied", timeout_s=250
    )
    assert "was killed by SIGABRT" in cell.raised.text
    assert "Check failed: context.ok()" in cell.raised.text
    assert "LogMessage::" not in cell.raised.text


def test_the_package_fits_this_torch() -> None:
    assert "torch_tpu" not in BACKEND.unavailable_reason()


@pytest.fixture(scope="module")
def hardware() -> Any:
    """Return torch_tpu's own table from its file, because importing the package would change torch for all tests."""
    package = importlib.util.find_spec("torch_tpu")
    assert package is not None
    assert package.submodule_search_locations is not None
    file = Path(package.submodule_search_locations[0]) / "_internal" / "utils" / "hardware.py"
    spec = importlib.util.spec_from_file_location("hardware_of_torch_tpu", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert "torch_tpu" not in sys.modules
    return module


@pytest.mark.parametrize("kind", MESHES)
def test_meshes_match_torch_tpu(hardware: Any, kind: str) -> None:
    (device,) = (one for one, name in tpu._CHIPS.items() if name == kind)
    assert dict(hardware._TOPOLOGY_BY_TPU_PCI_DEVICE_ID[device]) == dict(MESHES[kind])


def test_all_kinds_are_known(hardware: Any) -> None:
    assert {tpu._CHIPS[device] for device in hardware._TOPOLOGY_BY_TPU_PCI_DEVICE_ID} == MESHES.keys()
