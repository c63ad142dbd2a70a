"""The TorchTPU backend on a real TPU host. Skipped without one; these tests have not run yet.

On a host with at least one chip (such as v5e-8 or v6e-1), in a separate environment with Python 3.11 or later:

    pip install -e ".[test]" torch-tpu && python -m pytest tests/hardware/test_torch_tpu.py

The chips must not be in use, so close other notebooks first.
"""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nblaunch.backends.torch_tpu import BACKEND
from nblaunch.host import tpu as tpu_host
from tests.hardware import test_tpu
from tests.kernels import Kernel

pytestmark = [
    pytest.mark.tpu,
    pytest.mark.skipif(BACKEND.affinity() < 2, reason="no TPU chip here, or no torch_tpu"),
    pytest.mark.timeout(600),  # a chip's first operations are compiled one by one
]

PREAMBLE = """
import os, signal, sys, time
from nblaunch import Accelerator, last_job, notebook_launcher, set_seed
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.head = nn.Linear(64, 10)
    def forward(self, x):
        return self.head(self.second(torch.relu(self.first(x))))

def data():
    x = torch.randn(2048, 64, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x[:, :10].argmax(1))

def train(model, mixed_precision="no"):
    begun = time.time()
    accelerator = Accelerator(mixed_precision=mixed_precision)
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
    gathered = accelerator.gather(torch.tensor([accelerator.process_index], device=accelerator.device)).tolist()
    plain = accelerator.unwrap_model(model)
    weights = torch.cat([p.detach().cpu().flatten() for p in plain.parameters()])
    return {
        "device": str(accelerator.device), "chip": os.environ["TPU_VISIBLE_CHIPS"], "rank": accelerator.process_index,
        "workers": accelerator.num_processes, "sum over ranks": total[0], "gathered": gathered,
        "loss": round(loss.item(), 4), "weights": weights.double().sum().item(),
        "tied": getattr(plain, "first", None) is None or plain.first.weight is plain.second.weight,
        "ready s": round(ready - begun, 2), "train s": round(time.time() - ready, 2),
    }

def reference():
    model = Tied()
    model.load_state_dict(weights)
    loader = DataLoader(data(), 256, shuffle=True, generator=torch.Generator().manual_seed(2), drop_last=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).double().sum().item()

torch.manual_seed(0)
weights = Tied().state_dict()

def fresh():
    model = Tied()
    model.load_state_dict(weights)
    return model

def draw(folder):
    accelerator = Accelerator()
    set_seed(3)
    torch.rand(4, device=accelerator.device)
    accelerator.save_state(folder)
    first = torch.rand(4, device=accelerator.device).tolist()
    accelerator.load_state(folder)
    return first == torch.rand(4, device=accelerator.device).tolist()
"""


@pytest.fixture(scope="module")
def report(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Collect lines that are printed at the end, whatever the tests' outcome."""
    lines = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "torch_tpu", "libtpu")]
    lines += [f"Python {platform.python_version()}", f"chips {dict(tpu_host.vfio_chips())}"]
    yield lines
    capture = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("\n\n--- report ---", *lines, "--- end of report ---", sep="\n")


@pytest.fixture(scope="module")
def tpu(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """Start one kernel for all tests, so every launch but the first is in a kernel that has launched before."""
    with Kernel.start(env={"NBLAUNCH_LOG_DIR": str(tmp_path_factory.mktemp("logs"))}, is_new=True) as kernel:
        kernel.run(PREAMBLE)
        yield kernel
        assert kernel.run("'torch_tpu' in sys.modules").value is False


def _launch(tpu: Kernel, report: list[str], title: str, arguments: str = "(fresh(),)") -> Any:
    cell = tpu.run(
        "begun = time.time()\n"
        f"found = notebook_launcher(train, {arguments}, return_all=True, dashboard='text')\n"
        "found, round(time.time() - begun, 1), last_job().plan.backend.name, last_job().plan.start_method",
        timeout_s=500,
    )
    found, seconds, *plan = cell.value
    report += ["", f"## {title}: {seconds} s", *map(str, found)]
    report += [line for line in cell.stdout.splitlines() if line.startswith("nblaunch:")]
    assert plan == ["torch_tpu", "forkserver"]
    return found


def test_one_worker_per_chip_and_one_result(tpu: Kernel, report: list[str]) -> None:
    found = _launch(tpu, report, "first launch")
    count = BACKEND.device_count()
    assert [one["chip"] for one in found] == [str(rank) for rank in range(count)]
    assert {one["sum over ranks"] for one in found} == {count}
    assert all(one["gathered"] == list(range(count)) for one in found)
    assert len({one["weights"] for one in found}) == 1, "all ranks must end with the same weights"
    assert all(one["tied"] for one in found)


def test_training_on_tpu_equals_cpu(tpu: Kernel, report: list[str]) -> None:
    """The reference is a backward() in the kernel itself; the chips must still be free afterwards."""
    expected = tpu.run("reference()", timeout_s=120).value
    (found, *_) = _launch(tpu, report, "second launch, after a backward() in the kernel")
    report.append(f"sum of weights: TPU {found['weights']}, CPU {expected}")
    # TPUs may multiply float32 matrices in bfloat16 passes, so the results are only close.
    assert found["weights"] == pytest.approx(expected, rel=0.05, abs=0.5)


def test_bf16(tpu: Kernel, report: list[str]) -> None:
    (found, *_) = _launch(tpu, report, "bf16", "(fresh(), 'bf16')")
    assert 0 < found["loss"] < 3


def test_random_states_are_saved_and_put_back(tpu: Kernel, tmp_path: Path) -> None:
    cell = tpu.run(
        f"notebook_launcher(draw, ({str(tmp_path)!r},), return_all=True, dashboard='none')", timeout_s=300
    )
    assert cell.value == [True] * BACKEND.device_count()


def test_chips_are_free_after_an_interrupt(tpu: Kernel, report: list[str], tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    cell = tpu.submit(test_tpu.endless(begun, "fresh()"))
    tpu.wait_until(begun.exists, 300, "the workers to compute", cell)
    tpu.interrupt()
    assert cell.wait(60).raised.name == "KeyboardInterrupt"
    _launch(tpu, report, "after an interrupt")


def test_chips_are_free_after_a_worker_is_killed(tpu: Kernel, report: list[str]) -> None:
    cell = tpu.run(test_tpu.DYING.format(model="fresh()"), raises="WorkerDied", timeout_s=300)
    report += ["", "## killed", cell.raised.value]
    assert "SIGKILL" in cell.raised.value
    _launch(tpu, report, "after a kill")
