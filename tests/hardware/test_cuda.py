"""The CUDA backend on real GPUs. Skipped without one.

Tests of a process before CUDA is in use run in a fresh interpreter, because this process may already use it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nblaunch import Accelerator, context, env
from nblaunch.backends.gpu import CUDA
from nblaunch.progress.board_reports import LossReport
from nblaunch.wire.board import private_slot
from tests.training import ranks
from tests.training.ranks import rank_server  # noqa: F401  a fixture

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(CUDA.affinity() == 0, reason="no CUDA GPU here"),
]


IS_NAMED_INSTANCE = (env.read("CUDA_VISIBLE_DEVICES") or "").startswith("MIG-")


def _fresh(code: str) -> Any:
    """Return the JSON that ``code`` prints in a fresh interpreter."""
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(run.stdout.splitlines()[-1])


def test_gpus_are_counted_without_a_context() -> None:
    code = (
        "import json; from nblaunch.backends import first_use, gpu;"
        "count = gpu.CUDA.device_count();"
        "touched = first_use.is_cuda_initialised(); import torch;"
        "is_initialised = torch.cuda.is_initialized(); torch.cuda.init();"  # from here on, torch queries CUDA, not NVML
        "print(json.dumps([count, touched, is_initialised, torch.cuda.device_count()]))"
    )
    count, touched, is_initialised, true_count = _fresh(code)
    assert count == true_count
    assert not touched
    assert not is_initialised


_HAZARD = (
    "import json, torch; from nblaunch.backends.gpu import CUDA; {before};"
    "print(json.dumps(CUDA.fork_hazard()))"
)


# Through the runtime rather than NVML, as if the user had set the variable to 0.
_ASKING = "import os; os.environ['PYTORCH_NVML_BASED_CUDA_CHECK'] = '0'; torch.cuda.is_available()"
HAZARDS = {
    "torch.ones(3).sum()": None,
    "torch.ones(3, device='cuda')": "has used CUDA",
    "torch.ones((), requires_grad=True).backward()": "has run backward()",
    _ASKING: "has called the CUDA driver",
}


@pytest.mark.parametrize("before", HAZARDS)
def test_fork_hazards_are_found(before: str) -> None:
    found, expected = _fresh(_HAZARD.format(before=before)), HAZARDS[before]
    assert found is None if expected is None else expected in found


@pytest.mark.skipif(
    IS_NAMED_INSTANCE, reason="torch asks the driver about MIG instances that are named by UUID"
)
def test_queries_through_nvml_are_not_a_hazard() -> None:
    assert _fresh(_HAZARD.format(before="torch.cuda.is_available(); torch.cuda.device_count()")) is None


# Try a worker's operations in a fork: "" if they succeed, else the error.
_FORK = (
    "import json, os, torch; from nblaunch.backends.gpu import CUDA\n"
    "from torch.utils.data import DataLoader\n"
    "{before}\n"
    "hazard, (reader, writer) = CUDA.fork_hazard(), os.pipe()\n"
    "if (pid := os.fork()) == 0:\n"
    "    try:\n"
    "        (torch.ones(3, device='cuda', requires_grad=True) * 2).sum().backward()\n"
    "    except BaseException as error:\n"
    "        os.write(writer, repr(error)[:2000].encode())\n"
    "    os._exit(0)\n"
    "os.close(writer)\n"
    "failure = os.fdopen(reader).read()\n"
    "os.waitpid(pid, 0)\n"
    "print(json.dumps([hazard, failure]))"
)


@pytest.mark.parametrize(
    "before",
    [
        "torch.manual_seed(0); torch.cuda.manual_seed_all(0)",
        "torch.cuda.is_available(); torch.cuda.device_count()",
        "torch.amp.GradScaler('cuda')",
        "torch.nn.Linear(3, 3)(torch.ones(2, 3)).sum().backward()",
        "torch.autocast('cuda', dtype=torch.bfloat16)",
        "torch.get_device_module().device_count()",
        "torch.accelerator.is_available()",
        "next(iter(DataLoader([torch.ones(1)], pin_memory=True)))",
    ],
)
def test_a_fork_without_a_hazard_works(before: str) -> None:
    hazard, failure = _fresh(_FORK.format(before=before))
    assert (hazard is None) <= (failure == ""), (hazard, failure)


def _train(mixed_precision: str) -> dict[str, Any]:
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision=mixed_precision)
    module = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    inputs = torch.randn(256, 8, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    loader = DataLoader(data, batch_size=16, shuffle=True, pin_memory=True)
    model, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    losses = []
    for _ in range(8):
        for x, y in loader:
            loss = (model(x) - y).pow(2).mean()
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    weight = module[0].weight.detach()
    copies = accelerator.gather(weight.unsqueeze(0))
    return {
        "devices": (str(x.device.type), weight.device.type, str(accelerator.device)),
        "improved": losses[-1] < losses[0] / 4,
        "equal": bool((copies == copies[0]).all()),
        "flags": accelerator.gather(torch.tensor([True, False], device=accelerator.device)).tolist(),
        "group": accelerator.state.backend,
        "board": context.current().slot.read(0).loss is not None,
    }


@pytest.mark.parametrize("mixed_precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_training(mixed_precision: str, world_size: int) -> None:
    reason = CUDA.precision_problem(mixed_precision)
    if reason is not None:
        pytest.skip(reason)
    for rank, answers in enumerate(
        ranks.run(_train, world_size, mixed_precision, backend="cuda", timeout_s=100)
    ):
        count = CUDA.device_count()
        assert answers["devices"] == ("cuda", "cuda", f"cuda:{rank % count}")
        assert answers["improved"]
        assert answers["equal"]
        assert answers["flags"] == [True, False] * world_size
        assert answers["group"] == ("nccl" if world_size <= count else "gloo")
        assert answers["board"]


@pytest.mark.skipif(CUDA.device_count() < 2, reason="one GPU here")
@pytest.mark.leaves_behind("CUDA keeps its descriptors until this process ends")
def test_losses_of_one_process_may_lie_on_two_gpus() -> None:
    slot = private_slot()
    report = LossReport(slot, CUDA)
    for number in (0, 1):
        report.note(torch.tensor(float(number), device=f"cuda:{number}"), None)
    report.flush()
    assert slot.read(0).losses.means == (0.5,)
