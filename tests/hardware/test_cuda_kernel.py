"""Launches on real GPUs from real kernels. Skipped without one.

    pip install -e ".[test]" && python -m pytest tests/hardware -m cuda

One GPU is enough: two ranks then share it, over gloo. With two or more, the tests also use NCCL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nblaunch import env
from nblaunch.backends.gpu import CUDA
from nblaunch.host import gpus
from tests.kernels import Kernel

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(CUDA.affinity() == 0, reason="no CUDA GPU here"),
    pytest.mark.timeout(300),
]

COUNT = CUDA.device_count()
# Its UUID names the same device regardless of the CUDA_VISIBLE_DEVICES that the tests inherit.
ONE = {"CUDA_VISIBLE_DEVICES": gpus.visible()[0] if COUNT else ""}
IS_NAMED_INSTANCE = (env.read("CUDA_VISIBLE_DEVICES") or "").startswith("MIG-")
SLACK_BYTES = 64 << 20

PREAMBLE = """
import os, signal, time
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import nblaunch
from nblaunch import Accelerator, GradScalerKwargs, last_job, notebook_launcher
from nblaunch.backends import first_use
from pathlib import Path

def touches_gpu():
    return first_use.is_cuda_initialised()

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 10))

def train(model, mixed_precision="no", *scaling):
    handlers = [GradScalerKwargs(init_scale=scale, backoff_factor=factor) for scale, factor in scaling]
    accelerator = Accelerator(mixed_precision=mixed_precision, kwargs_handlers=handlers)
    x = torch.randn(512, 64, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x[:, :10].argmax(1)), 64 // accelerator.num_processes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, skipped = [], []
    for _ in range(4):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
            skipped.append(accelerator.optimizer_step_was_skipped)
    return {"device": str(accelerator.device), "group": accelerator.state.backend, "losses": losses,
            "skipped": skipped, "dtype": str(loss.dtype), "parent": os.getppid() == KERNEL}

KERNEL = os.getpid()
"""

StartKernel = Callable[..., Kernel]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartKernel]:
    """Start a kernel for one test, with these variables."""
    started: list[Kernel] = []

    def start(**env: str) -> Kernel:
        kernel = Kernel.start(env={"NBLAUNCH_LOG_DIR": str(tmp_path / "logs"), **env}, is_new=True)
        started.append(kernel)
        kernel.run(PREAMBLE)
        return kernel

    yield start
    for kernel in reversed(started):
        kernel.close()


def _launch(
    kernel: Kernel, arguments: str = "(build(),)", options: str = ""
) -> tuple[list[dict[str, Any]], str]:
    cell = kernel.run(
        f"found = notebook_launcher(train, {arguments}, return_all=True{options})\n"
        "found, last_job().plan.start_method",
        timeout_s=200,
    )
    return cell.value


def _utilisation() -> float | None:
    """Return the utilisation of the first GPU; None if it does not report it, like MIG instances and vGPUs."""
    meter = gpus.open_meter()
    try:
        return meter.read()[0]
    finally:
        meter.close()


def _used() -> int:
    """Return the bytes of the first GPU's memory that all processes of the host use."""
    import pynvml

    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByUUID(gpus.visible()[0])).used)
    finally:
        pynvml.nvmlShutdown()


def _alone(kernel: Kernel, arguments: str = "(build(),)") -> list[float]:
    """Return the losses of one process on the same global batches."""
    (found,), _ = _launch(kernel, arguments, ", num_processes=1")
    losses: list[float] = found["losses"]
    return losses


# --- how workers start -----------------------------------------------------------------------------------------------


def test_forked_workers_leave_the_kernel_without_a_context(start: StartKernel) -> None:
    kernel = start()
    for _ in range(2):
        found, method = _launch(kernel, "(build(), 'bf16')", ", mixed_precision='bf16'")
        assert method == "fork"
        assert [one["device"] for one in found] == [f"cuda:{index}" for index in range(COUNT)]
        assert all(one["parent"] for one in found)
    assert kernel.run("touches_gpu()").value is False


def test_tensors_of_an_error_and_of_a_value_arrive_on_the_cpu(start: StartKernel) -> None:
    """This includes tensors of another class or with attributes; the kernel stays without a context."""
    kernel = start()
    kernel.run(
        """
class Loss(torch.Tensor):
    pass
def fail():
    loss = torch.full((), float("nan"), device="cuda", requires_grad=True) * 2
    assert torch.isfinite(loss), loss
def give():
    named = torch.ones(2, device="cuda")
    named.label = "loss"
    return [named, torch.ones(2, device="cuda").as_subclass(Loss)]
"""
    )
    kernel.run("notebook_launcher(fail, num_processes=1)", raises="AssertionError")
    cell = kernel.run(
        """
import sys
values = notebook_launcher(give, num_processes=1)
[(type(value).__name__, value.device.type) for value in [sys.last_value.args[0], *values]], touches_gpu()
"""
    )
    assert cell.value == ([("Tensor", "cpu"), ("Tensor", "cpu"), ("Loss", "cpu")], False)


@pytest.mark.skipif(
    IS_NAMED_INSTANCE, reason="torch asks the driver about MIG instances that are named by UUID"
)
def test_checking_for_a_gpu_does_not_prevent_a_fork(start: StartKernel) -> None:
    kernel = start()
    cell = kernel.run("torch.cuda.is_available(), torch.cuda.device_count(), touches_gpu()")
    assert cell.value == (True, COUNT, False)
    assert _launch(kernel)[1] == "fork"


def test_cuda_in_use_in_the_kernel_needs_no_restart(start: StartKernel) -> None:
    kernel = start()
    kernel.run("model = build()\nmodel.to('cuda')")
    cell = kernel.run("found = notebook_launcher(train, (model,), return_all=True)", timeout_s=200)
    text = " ".join(cell.displays[0].data["text/plain"].split())
    assert "this process has used CUDA through torch" in text
    assert "cell 2, line 2: `model.to('cuda')`" in text
    assert "no restart" in text
    method, device, losses = kernel.run(
        "last_job().plan.start_method, str(model[0].weight.device), found[0]['losses']"
    ).value
    assert (method, device) == ("forkserver", "cuda:0")
    assert losses[-1] < losses[0] / 2
    # The trained weights are in the module, which is on the GPU.
    trained = "x = torch.randn(512, 64, generator=torch.Generator().manual_seed(1)).to('cuda')\n"
    trained += "nn.functional.cross_entropy(model(x), x[:, :10].argmax(1)).item()"
    assert kernel.run(trained).value < losses[0] / 2


def test_a_backward_on_the_cpu_needs_no_restart(start: StartKernel) -> None:
    kernel = start()
    kernel.run("build()(torch.ones(2, 64)).sum().backward()")
    found, method = _launch(kernel)
    assert method == "forkserver"
    assert found[0]["losses"][-1] < found[0]["losses"][0] / 2


# --- what they compute -----------------------------------------------------------------------------------------------


def test_two_ranks_on_one_gpu_match_one_process(start: StartKernel) -> None:
    kernel = start(**ONE)
    found, method = _launch(kernel, options=", num_processes=2, backend='cuda'")
    assert method == "fork"
    assert [(one["device"], one["group"]) for one in found] == [("cuda:0", "gloo")] * 2
    assert found[0]["losses"] == pytest.approx(_alone(kernel), rel=1e-3)
    rejected = kernel.run("notebook_launcher(train, (build(),), 2)", raises="ValueError")
    assert "backend='cuda' lets several" in rejected.raised.value


@pytest.mark.skipif(COUNT < 2, reason="NCCL joins two GPUs or more")
def test_nccl_ranks_match_one_process(start: StartKernel) -> None:
    kernel = start()
    found, _ = _launch(kernel, options=", num_processes=2")
    assert [(one["device"], one["group"]) for one in found] == [("cuda:0", "nccl"), ("cuda:1", "nccl")]
    assert found[0]["losses"] == pytest.approx(_alone(kernel), rel=1e-3)


FP16 = "(build(), 'fp16', (2.0**30, 2.0**-20))"
"""A scale that overflows, and then one that fits: with halving, two ranks would need one more step than one process."""


def test_fp16_skips_steps_until_the_scale_fits(start: StartKernel) -> None:
    kernel = start(**ONE)
    found, _ = _launch(kernel, FP16, ", num_processes=2, backend='cuda'")
    for one in found:
        assert one["skipped"] == [True] + [False] * (len(one["skipped"]) - 1)
        assert one["dtype"] == "torch.float32"
        assert one["losses"][-1] < one["losses"][0] / 2
    assert found[0]["losses"] == pytest.approx(_alone(kernel, FP16), rel=0.05)


def test_bf16(start: StartKernel) -> None:
    kernel = start(**ONE)
    found, _ = _launch(kernel, "(build(), 'bf16')", ", num_processes=2, backend='cuda'")
    assert not any(found[0]["skipped"])
    assert found[0]["losses"][-1] < found[0]["losses"][0] / 2
    assert found[0]["losses"] == pytest.approx(_alone(kernel), rel=0.1)


READ = """
from nblaunch.utils import DataLoaderConfiguration

def read():
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(non_blocking=True))
    data = TensorDataset(torch.arange(4096.0).repeat(64, 1), torch.arange(64))
    loader = DataLoader(data, 4, num_workers=2, pin_memory=True, persistent_workers=True)
    loader = accelerator.prepare(loader)
    seen = []
    for _ in range(2):
        for rows, numbers in loader:
            assert rows.device == accelerator.device
            assert bool((rows == torch.arange(4096.0, device=rows.device)).all())
            seen += accelerator.gather(numbers).tolist()
    return sorted(seen) == sorted(list(range(64)) * 2)
"""


def test_loader_batches_use_pinned_memory(start: StartKernel) -> None:
    """Each worker's loader forks readers and starts a thread that copies to pinned memory."""
    kernel = start(**ONE)
    kernel.run(READ)
    cell = kernel.run("notebook_launcher(read, (), 2, backend='cuda', return_all=True)", timeout_s=100)
    assert cell.value == [True, True]
    kernel.wait_for_no_processes()


# --- errors ----------------------------------------------------------------------------------------------------------


def test_device_asserts_are_explained_and_contained(start: StartKernel) -> None:
    kernel = start(**ONE)
    kernel.run(
        """
def pick():
    accelerator = Accelerator()
    torch.zeros(3, device=accelerator.device)[torch.tensor([5], device=accelerator.device)].sum().item()
"""
    )
    kind = "AcceleratorError" if hasattr(torch, "AcceleratorError") else "RuntimeError"  # since torch 2.8
    cell = kernel.run("notebook_launcher(pick, (), 1)", raises=kind, timeout_s=100)
    assert "device-side assert triggered" in cell.raised.text
    assert "rank 0: An operation on the GPU got an index that is out of range" in cell.raised.text
    assert "Try: the same function on the CPU" in cell.raised.text
    assert "Assertion" in kernel.run("last_job().logs(0)").value
    assert _launch(kernel)[0][0]["device"] == "cuda:0"


@pytest.mark.skipif(COUNT < 2, reason="NCCL joins two GPUs or more")
def test_an_error_arrives_while_another_rank_waits_in_nccl(start: StartKernel) -> None:
    kernel = start()
    kernel.run(
        """
def fail():
    accelerator = Accelerator()
    accelerator.wait_for_everyone()
    if accelerator.process_index == 1:
        raise LookupError("only here")
    dist.all_reduce(torch.ones(1 << 20, device=accelerator.device))
    torch.cuda.synchronize()
"""
    )
    cell = kernel.run("notebook_launcher(fail, (), 2)", raises="LookupError", timeout_s=100)
    assert "only here" in cell.raised.text
    kernel.wait_for_no_processes()
    assert _launch(kernel, options=", num_processes=2")[0][1]["group"] == "nccl"


SPIN = """
def spin():
    accelerator = Accelerator()
    accelerator.wait_for_everyone()
    if accelerator.process_index == 1:
        # On a GPU the process waits in cudaStreamSynchronize, which takes all of a core.
        if accelerator.device.type == "cuda":
            torch.cuda._sleep(1 << 40)
            torch.cuda.current_stream().synchronize()
        while True:
            pass
    accelerator.wait_for_everyone()
"""


def test_spinning_in_the_driver_is_a_hang(start: StartKernel) -> None:
    kernel = start(**ONE)
    kernel.run(SPIN)
    assert_spinning_is_a_hang(kernel, "cuda")


def assert_spinning_is_a_hang(kernel: Kernel, backend: str) -> None:
    cell = kernel.run(
        f"notebook_launcher(spin, (), 2, backend={backend!r}, hang_timeout_s=5, on_hang='stop', interrupt_grace_s=1)",
        raises="JobHung",
        timeout_s=100,
    )
    assert "rank 1" in cell.raised.value, cell.describe()
    assert "in spin" in cell.raised.value, cell.describe()


# --- memory ----------------------------------------------------------------------------------------------------------

HOLD = """
def hold(how, path=""):
    accelerator = Accelerator()
    kept = torch.ones(1 << 28, device=accelerator.device)     # 1 GiB
    torch.cuda.synchronize()
    accelerator.wait_for_everyone()
    if how == "error" and accelerator.is_main_process:
        raise LookupError("with a full hand")
    if how == "interrupt":
        Path(path).touch()
        while True:
            time.sleep(0.01)
    return torch.cuda.memory_allocated()
"""


@pytest.mark.parametrize("how", ["success", "error", "interrupt", "kill"])
def test_memory_is_given_back(how: str, start: StartKernel, tmp_path: Path) -> None:
    kernel = start(**ONE)
    kernel.run(HOLD)
    before = _used()
    path = tmp_path / "holding"
    kind = "interrupt" if how == "kill" else how
    cell = kernel.submit(f"notebook_launcher(hold, ({kind!r}, {str(path)!r}), 2, backend='cuda')")
    if kind == "interrupt":
        kernel.wait_until(path.exists, 100, "the workers to hold memory", cell)
        assert _used() > before + (1 << 30)
        kernel.interrupt()
        if how == "kill":
            kernel.interrupt()
    cell.wait(100)
    expected = {
        "success": None,
        "error": "LookupError",
        "interrupt": "KeyboardInterrupt",
        "kill": "KeyboardInterrupt",
    }
    assert (cell.error.name if cell.error else None) == expected[how], cell.describe()
    deadline = time.monotonic() + 5
    while _used() > before + SLACK_BYTES and time.monotonic() < deadline:
        continue
    assert _used() <= before + SLACK_BYTES


def test_a_full_gpu_is_explained(start: StartKernel) -> None:
    kernel = start(**ONE)
    kernel.run(
        """
def fill(num_rows):
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.ones(64, 8)), num_rows))
    kept = []
    for (x,) in loader:
        while True:
            kept.append(torch.ones(1 << 28, device=accelerator.device))
"""
    )
    cell = kernel.run("notebook_launcher(fill, (16,), 1)", raises="OutOfMemoryError", timeout_s=100)
    assert "rank 0: GPU memory ran out." in cell.raised.text
    assert "Try a smaller batch" in cell.raised.text
    assert "Host memory" not in cell.raised.text


def test_the_table_shows_memory_and_how_busy_the_gpu_is(start: StartKernel) -> None:
    kernel = start(**ONE)
    kernel.run(
        """
def work():
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.ones(64, 8)), 8))
    kept = torch.ones(1 << 29, device=accelerator.device)     # 2 GiB
    big = torch.ones(4096, 4096, device=accelerator.device)
    begun = time.monotonic()
    while time.monotonic() < begun + 5:
        for (x,) in loader:
            for _ in range(20):
                big @ big
            torch.cuda.synchronize()
""",
        timeout_s=100,
    )
    cell = kernel.submit("notebook_launcher(work, num_processes=1, dashboard='html')")
    if _utilisation() is not None:
        cell.wait_for(lambda cell: "% busy" in cell.shown, 60, "the table to show how busy the GPU is")
    cell.wait(60)
    assert " GB of " in cell.shown, "peak memory of the device stays"
