"""fork, forkserver and spawn behave alike; the choice between them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.conftest import START_METHODS
from tests.kernels import Kernel
from tests.thorough import thorough

# Two threads, even on a machine with few cores, because the tests need a pool.
USED_OPENMP = """
torch.set_num_threads(2)
big = torch.randn(2000, 2000)
layer = nn.Linear(2000, 2000)
layer(big).square().mean().backward()
(big @ big).sum().item()
"""

TRAIN = """
import torch._dynamo  # or each rank would import it, for its DistributedDataParallel
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def train():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(512, 512))
    x = torch.full((512, 512), float(dist.get_rank() + 1))
    loss = model(x).square().mean()
    loss.backward()
    normal = torch.empty(1 << 20).normal_()   # parallel as well
    gradient = model.module.weight.grad.sum()
    every = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(every, gradient)
    return torch.get_num_threads(), len({value.item() for value in every}), (x @ x).shape[0], len(normal)
"""

DRAWS = """
import random
import numpy as np

def draw():
    return random.random(), float(np.random.rand()), torch.rand(2).tolist()
"""


@pytest.mark.parametrize("method", START_METHODS)
def test_every_method_returns_prints_and_shares_the_model(shared: Kernel, method: str) -> None:
    cell = shared.run(
        f"""
import sys
argv = list(sys.argv)
model = nn.Linear(3, 2)
def train(model, factor):
    rank = int(os.environ["RANK"])
    print(f"hello from {{rank}}")
    with torch.no_grad():
        model.weight.fill_(factor * (rank + 1))
    assert sys.argv == argv
    return rank, os.getppid() == {shared.pid}, os.getpid() == {shared.pid}, model.weight.sum().item()
values = notebook_launcher(train, (model, 2.0), 2, start_method={method!r}, return_all=True)
values, model.weight.unique().tolist(), nblaunch.last_job().plan.start_method
"""
    )
    is_child = method != "forkserver"
    expected = ([(0, is_child, False, 12.0), (1, is_child, False, 24.0)], [2.0], method)
    assert cell.value == expected
    assert {"[0] hello from 0", "[1] hello from 1"} <= set(cell.stdout.splitlines())


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_the_number_of_workers_does_not_change_results(shared: Kernel, num_processes: int) -> None:
    cell = shared.run(
        f"""
def train():
    import torch.distributed as dist
    dist.init_process_group()
    total = torch.ones(())
    dist.all_reduce(total)
    print("reduced by", dist.get_rank())
    return os.getpid(), nblaunch.context.is_worker(), dist.get_world_size(), total.item()
import nblaunch.context
values = notebook_launcher(train, num_processes={num_processes}, return_all=True)
values
"""
    )
    values = cell.value
    assert len({pid for pid, *_ in values} | {shared.pid}) == num_processes + 1
    assert [rest for _, *rest in values] == [[True, num_processes, num_processes]] * num_processes
    printed = [line for line in cell.stdout.splitlines() if "reduced by" in line]
    labels = [""] if num_processes == 1 else [f"[{rank}] " for rank in range(num_processes)]
    assert sorted(printed) == [f"{label}reduced by {rank}" for rank, label in enumerate(labels)]


def test_a_kernel_that_used_openmp_forks_workers_that_use_it_too(fresh: Kernel) -> None:
    fresh.run(USED_OPENMP + TRAIN)
    for num_processes, num_threads in ((2, 2), (2, 1), (4, 2), (2, 2)):
        cell = fresh.run(
            f"""
values = notebook_launcher(train, num_processes={num_processes}, threads_per_process={num_threads}, return_all=True)
(big @ big).sum().item()                                  # the kernel goes on with its own threads
layer(big).square().mean().backward()
values, torch.get_num_threads(), nblaunch.last_job().plan.start_method
"""
        )
        values, kernel_threads, method = cell.value
        assert values == [(num_threads, 1, 512, 1 << 20)] * num_processes
        assert (kernel_threads, method) == (2, "fork")
    # If pools can't be paused, workers use one thread.
    cell = fresh.run(
        """
import nblaunch.start_methods.fork
nblaunch.start_methods.fork.pause_pools = lambda: False
notebook_launcher(train, num_processes=2, threads_per_process=2, return_all=True)
"""
    )
    assert cell.value == [(1, 1, 512, 1 << 20)] * 2
    # A user who asked for two threads and gets one sees a note.
    assert "one thread" in cell.stdout


def test_a_fork_hazard_leads_to_a_forkserver_and_is_named(shared: Kernel) -> None:
    shared.run(
        """
from nblaunch import backends
from nblaunch.backends.cpu import CpuBackend
class Hazardous(CpuBackend):
    is_oversubscribable = False
    def fork_hazard(self):
        return "this process has used the device, says the test"
    def device_count(self):
        return 2
real = backends.discover()["cpu"]
backends._built_in()["cpu"] = Hazardous()
"""
    )
    try:
        cell = shared.run(
            """
def where():
    return os.getppid()
value = notebook_launcher(where, num_processes=2)
value, nblaunch.last_job().plan.start_method
"""
        )
        parent, method = cell.value
        assert (parent != shared.pid, method) == (True, "forkserver")
        shown = cell.stdout + cell.displays[0].data["text/plain"]
        assert "forkserver" in shown
        assert "this process has used the device, says the test" in shown
        rejected = shared.run(
            "notebook_launcher(where, num_processes=2, start_method='fork')", raises="LaunchError"
        )
        assert "this process has used the device, says the test" in rejected.raised.value
        assert "start_method='fork'" in rejected.raised.value
        assert "start_method='auto'" in rejected.raised.value
    finally:
        shared.run("backends._built_in()['cpu'] = real")


def test_a_launch_from_a_thread_goes_through_a_forkserver(shared: Kernel) -> None:
    cell = shared.run(
        """
import threading
def where():
    return os.getppid()
got = []
thread = threading.Thread(target=lambda: got.append(notebook_launcher(where, num_processes=2)))
thread.start(); thread.join()
got[0] == os.getpid(), nblaunch.last_job().plan.start_method, nblaunch.last_job().plan.reason
"""
    )
    is_child, method, reason = cell.value
    assert (is_child, method) == (False, "forkserver")
    assert "thread" in reason


UNPICKLABLE = {
    "lock": "def make(lock):\n    def train():\n        return lock is not None\n    return train\n"
    "train = make(threading.Lock())",
    "holder.inner[1]": "class Holder:\n    pass\nholder = Holder()\nholder.inner = [1, threading.Lock()]\n"
    "def helper():\n    return holder\ndef train():\n    return helper() is not None",
}


@pytest.mark.parametrize("name", UNPICKLABLE)
def test_unpicklable_values_fork_or_are_named(shared: Kernel, name: str) -> None:
    shared.run(f"import threading\n{UNPICKLABLE[name]}")
    assert shared.run("notebook_launcher(train, num_processes=2)").value is True
    for method in ("forkserver", "spawn"):
        launch = f"notebook_launcher(train, num_processes=2, start_method={method!r})"
        cell = shared.run(launch, raises="PayloadError")
        assert f" {name} (" in cell.raised.value
        assert "start_method='fork'" in cell.raised.value
        assert "File " not in cell.raised.text  # neither the launcher's frames nor its callees' are shown
    assert shared.processes() == []


def test_earlier_cell_setup_is_harmless(fresh: Kernel) -> None:
    fresh.run(
        """
os.environ.update(MASTER_ADDR="10.255.255.1", MASTER_PORT="1", RANK="5", WORLD_SIZE="9", LOCAL_RANK="7")
import accelerate, torch.distributed as dist
from accelerate import PartialState
from nblaunch import Accelerator
"""
    )
    fresh.run(
        """
for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
    os.environ.pop(name)
theirs = accelerate.Accelerator(cpu=True)
ours = Accelerator()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
os.environ.update(MASTER_ADDR="10.255.255.1", MASTER_PORT="1", RANK="5", WORLD_SIZE="9", LOCAL_RANK="7")
"""
    )
    cell = fresh.run(
        """
def train():
    mine = Accelerator()
    rank = mine.process_index
    gathered = mine.gather(torch.tensor([rank]))
    hf = accelerate.Accelerator()
    return mine.num_processes, gathered.tolist(), hf.num_processes, hf.process_index == rank, dist.get_world_size()
values = [notebook_launcher(train, num_processes=2, return_all=True, start_method=method)
          for method in ("fork", "forkserver")]
values, dist.get_world_size(), ours.num_processes, theirs.num_processes, os.environ["RANK"]
"""
    )
    one = (2, [0, 1], 2, True, 2)
    assert cell.value == ([[one, one]] * 2, 1, 1, 1, "5")


@pytest.mark.parametrize("method", START_METHODS)
def test_path_objects_in_sys_path_are_ignored(shared: Kernel, method: str) -> None:
    """Imports in the kernel ignore it, too."""
    cell = shared.run(
        f"""
import pathlib
sys.path.append(pathlib.Path("elsewhere"))
try:
    value = notebook_launcher(lambda: 1, num_processes=1, start_method={method!r})
finally:
    sys.path.pop()
value
"""
    )
    assert cell.value == 1


LOADED = """
import importlib
class Loaded:
    def __init__(self, name):
        self.name = name
    def __reduce__(self):
        return importlib.import_module, (self.name,)
"""


def test_output_while_loading_the_call_is_shown(shared: Kernel, tmp_path: Path) -> None:
    (tmp_path / "talks.py").write_text("print('loading')\n")
    cell = shared.run(
        f"""{LOADED}
sys.path.append({str(tmp_path)!r})
try:
    value = notebook_launcher(lambda module: 1, (Loaded("talks"),), num_processes=1, start_method="forkserver")
finally:
    sys.path.pop()
value
"""
    )
    assert cell.value == 1
    assert cell.stdout.splitlines().count("loading") == 1


def test_a_forkserver_that_dies_while_it_loads_the_call_is_explained(shared: Kernel, tmp_path: Path) -> None:
    lines = ("import os", "os.write(2, b'Check failed: x\\n')", "os.abort()")
    (tmp_path / "dies.py").write_text("\n".join(lines))
    cell = shared.run(
        f"""{LOADED}
sys.path.append({str(tmp_path)!r})
try:
    notebook_launcher(lambda module: 1, (Loaded("dies"),), num_processes=2, start_method="forkserver")
finally:
    sys.path.pop()
""",
        raises="WorkerDied",
    )
    shown = cell.raised.value
    assert "rank 0" in shown
    assert "Check failed: x" in shown
    assert "Its Python stack" in shown
    assert "dies.py, line 3" in shown


def test_a_forkserver_that_is_killed_is_named_instead_of_its_ranks(shared: Kernel) -> None:
    shared.run(
        """
import signal, time
def kill_the_server():
    if os.environ["RANK"] == "0":
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(3600)
"""
    )
    cell = shared.run(
        "notebook_launcher(kill_the_server, num_processes=2, start_method='forkserver')", raises="WorkerDied"
    )
    assert cell.error is not None
    assert "ended with its forkserver (pid " in cell.error.value, cell.describe()
    assert "which was killed by SIGKILL" in cell.error.value, cell.describe()
    shared.wait_for_no_processes()


@pytest.mark.parametrize("methods", [("fork", "forkserver"), thorough(("spawn",))])
def test_random_numbers_do_not_depend_on_the_start_method(shared: Kernel, methods: tuple[str, ...]) -> None:
    cell = shared.run(
        f"{DRAWS}\nmethods = {methods}"
        """
def seed():
    random.seed(3); np.random.seed(4); torch.manual_seed(5)

drawn = {}
for method in methods:
    seed()
    drawn[method] = notebook_launcher(draw, num_processes=2, start_method=method, return_all=True)
seed()
drawn, draw()
"""
    )
    drawn, own = cell.value
    assert drawn == {method: [own, own] for method in methods}


@pytest.mark.parametrize("methods", [("fork", "forkserver"), thorough(("spawn",))])
def test_workers_pickle_definitions_of_cells_by_name(
    shared: Kernel, tmp_path: Path, methods: tuple[str, ...]
) -> None:
    """This covers checkpoints with a class of the notebook, gathered objects, and tasks of a process pool."""
    shared.run(
        """
import io, multiprocessing, pickle
from nblaunch import Accelerator
class Config:
    def __init__(self, lr): self.lr = lr
class Net(nn.Linear):
    pass
class Registered:
    def state_dict(self): return vars(self)
    def load_state_dict(self, state): vars(self).update(state)
def double(value):
    return 2 * value
def train(config, folder):
    accelerator, registered = Accelerator(), Registered()
    registered.config = config
    accelerator.register_for_checkpointing(registered)
    accelerator.save_state(folder)
    registered.config = None
    accelerator.load_state(folder)
    kept = [registered.config, *accelerator.gather_object([config])]
    file = io.BytesIO()
    torch.save({"config": config, "model": Net(2, 2)}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with multiprocessing.get_context("fork").Pool(1) as pool:
        doubled = pool.map(double, [loaded["config"].lr])
    is_same = {type(one) for one in [loaded["config"], *kept]} == {Config}, type(loaded["model"]) is Net
    return *is_same, doubled, pickle.loads(pickle.dumps(train)) is train
"""
    )
    for method in methods:
        arguments = f"(Config(3), {str(tmp_path / method)!r})"
        cell = shared.run(
            f"notebook_launcher(train, {arguments}, num_processes=2, backend='cpu', start_method={method!r})"
        )
        assert cell.value == (True, True, [6], True), method
    own = shared.run(
        f"type(notebook_launcher(Config, (4,), num_processes=1, backend='cpu', start_method={methods[-1]!r})) is Config"
    )
    assert own.value is True


# "forkserver" is the default of Python 3.14. A loader's fresh processes load the cell's classes; its forked processes
# already have them, in every rank.
@pytest.mark.parametrize(
    ("of_the_loader", "methods"),
    [("fork", ("spawn",)), ("forkserver", ("fork", "forkserver")), thorough("spawn", START_METHODS)],
    ids=["fork", "forkserver", "spawn"],
)
def test_a_dataset_of_a_cell_is_read_by_processes_of_a_loader(
    shared: Kernel, of_the_loader: str, methods: tuple[str, ...]
) -> None:
    cell = shared.run(
        f"""
import multiprocessing
from torch.utils.data import DataLoader, Dataset
class Scaled(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return apply_scale(index)
def apply_scale(index):
    return scale * index
def as_list(rows):
    return type(rows).__name__, rows
scale = 3
def read():
    multiprocessing.set_start_method({of_the_loader!r}, force=True)
    return list(DataLoader(Scaled(), batch_size=2, num_workers=1, collate_fn=lambda rows: as_list(rows)))
before = multiprocessing.get_start_method()
multiprocessing.set_start_method({of_the_loader!r}, force=True)
try:
    read_by = [notebook_launcher(read, num_processes=1, start_method=method) for method in {methods!r}]
finally:
    multiprocessing.set_start_method(before, force=True)
read_by
""",
    )
    assert cell.value == [[("list", [0, 3]), ("list", [6, 9])]] * len(methods)
