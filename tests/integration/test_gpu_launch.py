"""Launches on machines with GPUs, in real kernels: the GPUs are simulated, everything else is real."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels import Kernel

# A CPU backend that answers the launcher like the CUDA backend, and a torch that can be made to believe that it has
# initialised CUDA: stubs replace the two calls that a build without CUDA lacks, and queries of the device are left out;
# the rest is torch's own.
MADE_UP = """
from nblaunch import backends
from nblaunch.backends import first_use
from nblaunch.backends.cpu import CpuBackend
from nblaunch.backends.gpu import CUDA

class MadeUp(CpuBackend):
    is_oversubscribable = False
    shares_devices = True
    def device_count(self):
        return 1
    fork_hazard, first_use = CUDA.fork_hazard, CUDA.first_use
    def launch_notes(self, num_processes):
        return ("workers share a made-up device",) if num_processes > 1 else ()

    def explain_failure(self, error):
        if "asks for it" in str(error):
            raise LookupError("no such device")
        return CUDA.explain_failure(error)

real = backends.discover()["cpu"]
backends._built_in()["cpu"] = MadeUp()
torch._C._cuda_getDeviceCount = lambda: 1
torch._C._cuda_init = lambda: None
vars(torch.cuda)["_cudart"] = object()  # not an assignment to an attribute, which workers would miss
torch.cuda._queued_calls[:] = [call for call in torch.cuda._queued_calls if call[0].__module__ != "torch.cuda"]
def where():
    return os.getppid()
"""


@pytest.fixture(scope="module")
def made_up(shared: Kernel) -> Kernel:
    """Start one kernel for the tests that do not use its CUDA."""
    shared.run(MADE_UP)
    return shared


def test_the_first_use_of_cuda_is_named_and_needs_no_restart(fresh: Kernel) -> None:
    fresh.run(MADE_UP)
    forked = fresh.run("notebook_launcher(where) == os.getpid()")
    assert forked.result == "True"
    fresh.run("def build_model():\n    torch.cuda.init()\n\nbuild_model()")
    cell = fresh.run("notebook_launcher(where) == os.getpid(), nblaunch.last_job().plan.start_method")
    assert cell.value == (False, "forkserver")
    text = " ".join(cell.displays[0].data["text/plain"].split())
    assert "warning" not in text
    assert "this process has used CUDA through torch, and CUDA can't be used in a forked process" in text
    assert "the device was first used in cell 4, line 2: `torch.cuda.init()`" in text
    assert "no restart" in text


def test_naming_a_device_shares_it(made_up: Kernel) -> None:
    rejected = made_up.run("notebook_launcher(where, num_processes=2)", raises="ValueError")
    assert "valid values are 1 to 1, or None for all; backend='cpu' lets several" in rejected.raised.value
    cell = made_up.run("notebook_launcher(where, num_processes=2, backend='cpu', return_all=True)")
    assert len(cell.value) == 2
    assert "workers share a made-up device" in cell.stdout


def test_a_full_gpu_is_explained(made_up: Kernel) -> None:
    made_up.run(
        """
def fill():
    if os.environ["RANK"] == "1":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    time.sleep(60)
"""
    )
    cell = made_up.run("notebook_launcher(fill, num_processes=2, backend='cpu')", raises="OutOfMemoryError")
    shown = cell.raised.text
    assert "rank 1: GPU memory ran out." in shown
    assert "Try a smaller batch" in shown
    assert "Host memory" not in shown


def test_an_unreadable_device_does_not_hide_the_error(made_up: Kernel) -> None:
    made_up.run("def fail():\n    raise ValueError('asks for it')")
    cell = made_up.run("notebook_launcher(fail)", raises="ValueError")
    assert "(the device could not be queried: LookupError: no such device)" in cell.raised.text


# A module that uses the device at import, like bitsandbytes. It is pickled by its name.
TOUCHY = """
from nblaunch import backends
from nblaunch.backends.cpu import CpuBackend

class Touched(CpuBackend):
    def fork_hazard(self):
        return "this process has used the device, says the module"

backends._built_in()["cpu"] = Touched()
"""


def test_a_function_whose_modules_use_the_device_is_loaded_by_every_worker(
    fresh: Kernel, tmp_path: Path
) -> None:
    (tmp_path / "touchy.py").write_text(TOUCHY)
    fresh.run(
        f"""
sys.path.insert(0, {str(tmp_path)!r})
import touchy
model = torch.nn.Linear(2, 2)
drawn = torch.rand(2)
torch.manual_seed(5)
def train(model):
    assert touchy.Touched
    torch.distributed.init_process_group("gloo")
    mine = torch.ones(1)
    torch.distributed.all_reduce(mine)
    with torch.no_grad():
        model.weight.fill_(7)
    return os.getppid(), mine.item(), torch.rand(1).item()
"""
    )
    cell = fresh.run(
        "before = torch.get_rng_state()\n"
        "values = notebook_launcher(train, (model,), 2, return_all=True)\n"
        "torch.set_rng_state(before)\n"
        "expected = torch.rand(1).item()\n"
        "parents, sums, draws = zip(*values)\n"
        "len(set(parents)), parents[0] == os.getpid(), sums, set(draws) == {expected}, "
        "model.weight.unique().tolist(), nblaunch.last_job().plan.start_method"
    )
    assert cell.value == (1, False, (2.0, 2.0), True, [7.0], "forkserver")
    text = " ".join(cell.stdout.split())
    assert "every worker loads the function" in text
    assert "this process has used the device, says the module" in text
    _check_failing_and_stopping(fresh)


def _check_failing_and_stopping(kernel: Kernel) -> None:
    kernel.run(
        """
def train(is_endless):
    print("in", touchy.__name__, flush=True)
    while is_endless:
        time.sleep(0.01)
    if os.environ["RANK"] == "1":
        raise LookupError("not here")
"""
    )
    kernel.run("notebook_launcher(train, (False,), 2)", raises="LookupError")
    cell = kernel.submit("notebook_launcher(train, (True,), 2)")
    cell.wait_for(lambda cell: cell.stdout.count("in touchy") == 2, what="both ranks to run")
    kernel.interrupt()
    assert cell.wait().raised.name == "KeyboardInterrupt"


def test_the_table_shows_how_busy_the_device_is(made_up: Kernel, tmp_path: Path) -> None:
    made_up.run(
        """
from nblaunch.host.gpus import DeviceMeter
class Meter(DeviceMeter):
    def read(self):
        return [0.5]
MadeUp.open_meter = lambda self: Meter()
def work(until):
    while not os.path.exists(until):
        time.sleep(0.01)
"""
    )
    seen = tmp_path / "seen"
    cell = made_up.submit(f"notebook_launcher(work, ({str(seen)!r},), dashboard='html')")
    cell.wait_for(
        lambda cell: any("50% busy" in display.data.get("text/plain", "") for display in cell.displays),
        what="the table to show how busy the device is",
    )
    seen.touch()
    cell.wait()
