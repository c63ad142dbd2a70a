"""The XLA backend on a real TPU host. Skipped without one; these tests have not run yet.

On a host with at least one chip (such as v5e-8), one command runs the tests and prints a report for an issue:

    pip install -e ".[tpu,test]" && python -m pytest tests/hardware/test_tpu.py

No process may use the chips, so close other notebooks first.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nblaunch.backends.xla import BACKEND
from nblaunch.host import tpu as tpu_host
from tests.kernels import Kernel

HAS_TPU = BACKEND.affinity() > 0 and BACKEND.device_noun == "TPU chip"

pytestmark = [
    pytest.mark.tpu,
    pytest.mark.skipif(not HAS_TPU, reason="no TPU chip here, or no torch_xla"),
    pytest.mark.timeout(600),  # the first graphs on eight chips take a while
]

PREAMBLE = """
import os, signal, time
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from nblaunch import Accelerator, last_job, notebook_launcher

def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

def data():
    x = torch.randn(2048, 64, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :10].argmax(1))

def train(model, mixed_precision="no", downcast=False):
    begun = time.time()
    accelerator = Accelerator(mixed_precision=mixed_precision, downcast_bf16=downcast)
    order = torch.Generator().manual_seed(2)
    share = 256 // accelerator.num_processes
    loader = DataLoader(data(), share, shuffle=True, generator=order, drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    ready = time.time()
    for _ in range(4):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    total = accelerator.reduce(torch.ones(2, device=accelerator.device), "sum").tolist()
    import torch_xla.debug.metrics as metrics
    compiled = metrics.metric_data("CompileTime")
    weights = torch.cat([p.detach().cpu().flatten() for p in model.parameters()])
    return {
        "device": str(accelerator.device), "hardware": os.environ.get("PJRT_DEVICE"), "rank": accelerator.process_index,
        "launched as": int(os.environ["RANK"]), "workers": accelerator.num_processes, "sum over ranks": total[0],
        "loss": round(loss.item(), 4), "weights": weights.double().sum().item(), "graphs": compiled[0],
        "compile s": round(compiled[1] / 1e9, 2), "ready s": round(ready - begun, 2),
        "train s": round(time.time() - ready, 2),
        "third": torch.tensor([1 / 3]).to(accelerator.device).cpu().item(),
        "third as double": torch.tensor([1 / 3], dtype=torch.float64).to(accelerator.device).cpu().item(),
    }

def reference():
    model = build()
    loader = DataLoader(data(), 256, shuffle=True, generator=torch.Generator().manual_seed(2), drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double().sum().item()
"""

DYING = """
def die(model):
    accelerator = Accelerator()
    accelerator.prepare(model)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        os.kill(os.getpid(), signal.SIGKILL)
    accelerator.wait_for_everyone()
notebook_launcher(die, ({model},))
"""


def endless(begun: Path, model: str) -> str:
    """Return code for a launch that only an interrupt ends, and that creates a file once it computes."""
    return f"""
def endless(model):
    accelerator = Accelerator()
    model = accelerator.prepare(model)
    while True:
        model(torch.ones(4, 64, device=accelerator.device)).sum().item()
        open({str(begun)!r}, "w").close()
notebook_launcher(endless, ({model},))
"""


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Collect lines that are printed at the end, whatever the tests' outcome."""
    lines = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "torch_xla")]
    lines += [f"Python {platform.python_version()}", f"chips {dict(tpu_host.chips())}"]
    yield lines
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n\n--- report ---", *lines, "--- end of report ---", sep="\n")


@pytest.fixture(scope="module")
def tpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Start one kernel for all tests, so every launch but the first is in a kernel that has launched before."""
    folder = tmp_path_factory.mktemp("tpu")
    env = {"NBLAUNCH_LOG_DIR": str(folder / "logs"), "NBLAUNCH_XLA_CACHE": str(folder / "graphs")}
    with Kernel.start(env=env, is_new=True) as kernel:
        kernel.run(PREAMBLE)
        yield kernel


def _launch(
    tpu: Kernel, report: list[str], title: str, arguments: str = "(build(),)", options: str = ""
) -> Any:
    cell = tpu.run(
        "begun = time.time()\n"
        f"found = notebook_launcher(train, {arguments}, return_all=True, dashboard='text'{options})\n"
        "found, round(time.time() - begun, 1), last_job().plan.start_method",
        timeout_s=500,
    )
    found, seconds, method = cell.value
    report += ["", f"## {title}: {seconds} s, {method}", *map(str, found)]
    report += [line for line in cell.stdout.splitlines() if line.startswith("nblaunch:")]
    return found


def test_one_worker_per_chip_and_one_result(tpu: Kernel, report: list[str]) -> None:
    found = _launch(tpu, report, "first launch")
    count = BACKEND.device_count()
    assert len(found) == count
    assert sorted(one["rank"] for one in found) == list(range(count))
    assert {one["sum over ranks"] for one in found} == {count}
    assert len({one["weights"] for one in found}) == 1, "all ranks must end with the same weights"
    assert {one["hardware"] for one in found} == {"TPU"}


def test_training_on_tpu_equals_cpu(tpu: Kernel, report: list[str]) -> None:
    """The reference also runs in a worker, because a backward() in the kernel would change how later workers start."""
    (found, *_) = _launch(tpu, report, "second launch, graphs from the cache")
    expected = tpu.run("notebook_launcher(reference, num_processes=1, backend='cpu')", timeout_s=120).value
    report.append(f"sum of weights: TPU {found['weights']}, CPU {expected}")
    # By default, TPUs multiply float32 matrices in bfloat16 passes, so the results are only close.
    assert found["weights"] == pytest.approx(expected, rel=0.05, abs=0.5)


@pytest.mark.parametrize(("downcast", "double"), [(False, 0.333984375), (True, 0.3333333432674408)])
def test_bf16(tpu: Kernel, report: list[str], downcast: bool, double: float) -> None:
    (found, *_) = _launch(tpu, report, f"bf16, downcast={downcast}", f"(build(), 'bf16', {downcast})")
    assert found["third"] == 0.333984375
    assert found["third as double"] == double


def test_chips_are_free_after_an_interrupt(tpu: Kernel, report: list[str], tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    cell = tpu.submit(endless(begun, "build()"))
    tpu.wait_until(begun.exists, 300, "the workers to compute", cell)
    tpu.interrupt()
    assert cell.wait(60).raised.name == "KeyboardInterrupt"
    _launch(tpu, report, "after an interrupt")


def test_chips_are_free_after_a_worker_is_killed(tpu: Kernel, report: list[str]) -> None:
    cell = tpu.run(DYING.format(model="build()"), raises="WorkerDied", timeout_s=300)
    report += ["", "## killed", cell.raised.value]
    assert "SIGKILL" in cell.raised.value
    _launch(tpu, report, "after a kill")


def test_one_process_drives_all_chips(tpu: Kernel, report: list[str]) -> None:
    (found,) = _launch(tpu, report, "SPMD", options=", strategy='spmd'")
    assert found["workers"] == 1


def test_plain_torch_xla_sees_all_workers(tpu: Kernel, report: list[str]) -> None:
    """The function uses no Accelerator of nblaunch, but torch_xla's ranks, reductions and process group, and
    Accelerate.
    """
    cell = tpu.run(
        """
def plain():
    import torch_xla, torch_xla.core.xla_model as xm, torch_xla.runtime as xr
    total = xm.all_reduce(xm.REDUCE_SUM, torch.ones(2, device=torch_xla.device())).tolist()[0]
    return xr.world_size(), xr.global_ordinal(), total
def group():
    import torch.distributed as dist, torch_xla, torch_xla.distributed.xla_backend
    dist.init_process_group("xla", init_method="xla://")
    total = torch.ones(2, device=torch_xla.device())
    dist.all_reduce(total)
    return dist.get_world_size(), dist.get_rank(), total.tolist()[0]
def theirs():
    try:
        from accelerate import Accelerator
    except ImportError:
        return None
    return Accelerator().num_processes
options = dict(return_all=True, dashboard="none")
notebook_launcher(plain, **options) + notebook_launcher(group, **options), notebook_launcher(theirs, dashboard="none")
""",
        timeout_s=500,
    )
    worlds, num_processes = cell.value
    report += ["", f"## plain torch_xla: {worlds}; Hugging Face Accelerate: {num_processes}"]
    count = BACKEND.device_count()
    assert {(size, total) for size, _, total in worlds} == {(count, count)}
    assert sorted(ordinal for _, ordinal, _ in worlds) == sorted(2 * list(range(count)))
    assert num_processes in (None, count)


@pytest.mark.timeout(1800)
def test_correct_loops_get_no_notes(tpu: Kernel, report: list[str]) -> None:
    from tests.xla import test_false_notes as loops

    tpu.run(loops.LOOPS)
    found = {name: loops.notes(tpu, body) for name, body in loops.FAULTLESS.items()}
    report += ["", f"## notes: {found}"]
    assert {name: notes for name, notes in found.items() if notes} == {}


def test_a_model_is_sharded_over_all_chips(tpu: Kernel, report: list[str]) -> None:
    """The runtime's figures and the tensors' shards show it, and the model learns the same as with full weights."""
    cell = tpu.run(
        """
def sharded(is_sharded):
    from nblaunch import FullyShardedDataParallelPlugin
    import torch_xla, torch_xla.core.xla_model as xm
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin() if is_sharded else None)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    x = torch.randn(64, 4096, generator=torch.Generator().manual_seed(1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(x), 16))
    losses = []
    for (x,) in loader:
        loss = (model(x) - x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    tensors = [*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())]
    parts = [torch_xla._XLAC._get_local_shards([tensor])[0] for tensor in tensors]
    share = sum(parts[0][0].numel() for parts in parts) / sum(tensor.numel() for tensor in tensors)
    return torch.stack(losses).tolist(), share, xm.get_memory_info().get("bytes_used")
[notebook_launcher(sharded, (is_sharded,), strategy="spmd") for is_sharded in (False, True)]
""",
        timeout_s=500,
    )
    (whole, _, whole_bytes), (parts, share, bytes_on_each) = cell.value
    report += ["", f"## sharded over chips: {cell.value}"]
    count = BACKEND.device_count()
    assert parts == pytest.approx(whole, rel=0.02)
    assert share == pytest.approx(1 / count)
    if count == 8:
        assert bytes_on_each < whole_bytes / 4


def test_host_memory(report: list[str]) -> None:
    from tests.xla import memory

    taken = memory.measure("passed", device="TPU", timeout_s=500)
    report += ["", f"## memory: {taken}"]
    count = BACKEND.device_count()
    assert taken.peak < taken.start + (count + 1) * memory.MODEL_BYTES, "more than a copy per worker"


def test_a_backward_in_the_kernel_needs_no_restart(tpu: Kernel, report: list[str]) -> None:
    """This is the last test: from here on, this kernel's workers start from the forkserver."""
    tpu.run("reference()", timeout_s=120)
    _launch(tpu, report, "after a backward() in the kernel")
    assert tpu.run("last_job().plan.start_method").value == "forkserver"
