"""Facts about the kernel that decide whether workers can be forked from it (PJRT CPU)."""

from __future__ import annotations

import gc
import json
import subprocess
import sys

import pytest

from tests.xla.conftest import StartKernel

pytestmark = [pytest.mark.usefixtures("compile_quickly")]

INITIALISES = (
    "torch_xla.device()",
    "xm.xla_device()",
    "xr.world_size()",
    "xr.global_ordinal()",
    "xm.is_master_ordinal()",
    "torch_xla.device_count()",
    "xm.get_xla_supported_devices()",
    "xr.addressable_device_count()",
    "xr.process_index()",
    "xr.is_bf16_supported()",
    "torch.ones(1, device='xla')",
    "torch_xla.manual_seed(0)",
    "torch_xla.sync()",
    "xm.mark_step()",
    "xm.wait_device_ops()",
    "met.metrics_report()",
)
LEAVES_ALONE = (
    "torch.device('xla')",
    "torch.manual_seed(0)",
    "xr.device_type()",
    "xr.is_spmd()",
    "xr.local_process_count()",
    "xr.initialize_cache('/tmp/nblaunch-unused')",
    "torch.autocast('xla', dtype=torch.bfloat16)",
    "met.metric_data('CompileTime')",
    # nblaunch's own calls in the kernel.
    "BACKEND.affinity()",
    "BACKEND.device_count()",
    "BACKEND.launch_problem()",
    "BACKEND.prepare_launcher()",
    "BACKEND.fork_hazard()",
    "BACKEND.worker_env(Topology(rank=1, local_rank=1, world_size=2, local_world_size=2, master_port=1))",
    "BACKEND.seed(3)",
    "xla_runtime.counters()",
)

TRY_EACH = """
import json, os, sys, warnings
import torch, torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from nblaunch.backends import xla_runtime
from nblaunch.backends.xla import BACKEND
from nblaunch.topology import Topology

answers = {}
for call in json.loads(sys.argv[1]):
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        warnings.simplefilter("ignore")
        eval(call)
        os.write(writer, b"1" if torch_xla._XLAC._xla_runtime_is_initialized() else b"0")
        os._exit(0)
    os.close(writer)
    answers[call] = os.read(reader, 1).decode()
    os.waitpid(pid, 0)
    os.close(reader)
print(json.dumps([answers, torch_xla._XLAC._xla_runtime_is_initialized()]))
"""


def test_initialising_calls_are_known() -> None:
    """Each call runs in a separate fork. The backend searches the history for the calls that initialise the runtime."""
    calls = [*INITIALISES, *LEAVES_ALONE]
    run = subprocess.run(
        [sys.executable, "-c", TRY_EACH, json.dumps(calls)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    answers, is_initialised = json.loads(run.stdout.splitlines()[-1])
    assert not is_initialised
    assert {call for call, answer in answers.items() if answer == "1"} == set(INITIALISES)
    assert {call for call, answer in answers.items() if answer == "0"} == set(LEAVES_ALONE)


def test_a_launch_looks_at_the_heap_only_where_torch_xla_was_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """A garbage collection takes longer than all forks of a launch."""
    from nblaunch.backends.xla import BACKEND

    BACKEND.prepare_launcher()
    monkeypatch.setattr(gc, "collect", lambda: pytest.fail("a later launch collects, too"))
    BACKEND.prepare_launcher()


def test_the_history_is_searched_for_what_initialises() -> None:
    from nblaunch.backends.first_use import first_match

    for call in INITIALISES:
        found = first_match(["", "import torch_xla", f"x = 1\nd = {call}"])
        assert found.startswith(" (probably in cell 2, line 2: `d = "), call
    assert first_match(["", "def train():\n    d = torch_xla.device()\n# torch_xla.device()"]) == ""


TRAIN = """
def train(model):
    accelerator = Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    loss = model(torch.ones(4, 3, device=accelerator.device)).sum()
    accelerator.backward(loss)
    optimizer.step()
    return loss.item()
"""


def test_a_backward_in_the_kernel_needs_no_restart(start_xla: StartKernel) -> None:
    """It breaks the first backward of every forked worker, so workers start from the forkserver."""
    kernel = start_xla()
    kernel.run(TRAIN)
    cell = kernel.run(
        """
from nblaunch.backends.xla import BACKEND
model = nn.Linear(3, 2)
clean = BACKEND.fork_hazard()
first = notebook_launcher(train, (model,), num_processes=2), last_job().plan.start_method
model(torch.ones(1, 3)).sum().backward()
hazard = BACKEND.fork_hazard()
second = notebook_launcher(train, (model,), num_processes=2), last_job().plan.start_method
clean, first[1], hazard, second[1], is_initialised()
""",
    )
    clean, first, hazard, second, is_initialised = cell.value
    assert clean is None
    assert (first, second) == ("fork", "forkserver")
    assert hazard.startswith("backward() ran in this process")
    assert not is_initialised


def test_a_device_in_use_in_the_kernel_is_named(start_xla: StartKernel) -> None:
    """On the CPU, workers can still start from the forkserver; on a TPU, the chips would be taken."""
    kernel = start_xla()
    kernel.run(TRAIN)
    kernel.run("import torch_xla\ndevice = torch_xla.device()")
    kernel.run("notebook_launcher(train, (nn.Linear(3, 2),), 2, start_method='fork')", raises="LaunchError")
    cell = kernel.run(
        """
result = notebook_launcher(train, (nn.Linear(3, 2),), num_processes=2)
last_job().plan.start_method, last_job().plan.reason
""",
    )
    method, reason = cell.value
    assert method == "forkserver"
    assert "this process has initialised the XLA runtime (probably in cell" in reason
    assert "line 2: `device = torch_xla.device()`" in reason


def test_the_devices_are_chosen_by_the_environment_or_by_name(start_xla: StartKernel) -> None:
    kernel = start_xla(PJRT_DEVICE="")
    cell = kernel.run(
        """
def device():
    return str(Accelerator().device), os.environ.get("PJRT_DEVICE")
found = [notebook_launcher(device, num_processes=1)]
found.append(notebook_launcher(device, num_processes=1, backend="xla"))
found.append(notebook_launcher(device, num_processes=1))
os.environ["PJRT_DEVICE"] = "CPU"
found.append(notebook_launcher(device, num_processes=1))
found
""",
    )
    assert cell.value == [("cpu", ""), ("xla:0", "CPU"), ("cpu", ""), ("xla:0", "CPU")]
