"""Launch after launch in one kernel: nothing grows, what the kernel runs by itself goes on, and what memory it takes."""

from __future__ import annotations

import pytest

from tests.kernels import Kernel

MB = 1 << 20


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_hundred_launches_leave_the_kernel_as_small_as_before(fresh: Kernel) -> None:
    cell = fresh.run(
        """
import gc, psutil, threading
me = psutil.Process()
def train(model):
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(())
    dist.all_reduce(total)
    print("a line")
    return {"total": total, "weights": model.weight}
def state():
    gc.collect()
    # Not the history of IPython, whose file is opened now and then.
    fds = [fd for fd in os.listdir("/proc/self/fd") if "history" not in os.path.realpath(f"/proc/self/fd/{fd}")]
    return len(fds), me.num_threads(), threading.active_count(), len(me.children(recursive=True))
model = nn.Linear(100, 100)
for _ in range(10):
    notebook_launcher(train, (model,), 2)
before, rss = state(), me.memory_info().rss
for _ in range(100):
    value = notebook_launcher(train, (model,), 2)
after, grown = state(), me.memory_info().rss - rss
before, after, grown, value["total"].item()
""",
        timeout_s=90,
    )
    before, after, grown, total = cell.value
    assert total == 2.0
    assert all(now <= then for now, then in zip(after, before, strict=True)), (before, after)
    assert grown < 20 * MB


# Workers say through one pipe that they are ready, then wait for a byte of another: while nothing moves, their memory
# can be read.
MEASURE = """
import gc, psutil, threading
def pss(pid):
    for line in open(f"/proc/{pid}/smaps_rollup"):
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
def hold(model, touches, ready, go):
    used = float(sum(p.sum() for p in model.parameters())) if model is not None and touches else 0.0
    gc.collect()
    with open(ready, "w") as file:
        file.write("r")
    os.read(os.open(go, os.O_RDWR), 1)
    return used
def total_pss(model, touches, num_processes, method):
    import tempfile
    folder = tempfile.mkdtemp()
    ready, go = os.path.join(folder, "ready"), os.path.join(folder, "go")
    os.mkfifo(ready); os.mkfifo(go)
    ready_fd = os.open(ready, os.O_RDWR)
    go_fd = os.open(go, os.O_RDWR)
    gc.collect()
    job = notebook_launcher(hold, (model, touches, ready, go), num_processes, start_method=method, background=True,
                            sync_weights=False, dashboard="none")
    num_ready = 0
    while num_ready < num_processes:
        num_ready += len(os.read(ready_fd, 100))
    me = psutil.Process()
    total = sum(pss(process.pid) for process in (me, *me.children(recursive=True)))
    os.write(go_fd, b"g" * num_processes)
    job.result(60)
    os.close(go_fd); os.close(ready_fd)
    return total
"""


@pytest.mark.slow
@pytest.mark.parametrize(("method", "copies"), [("fork", 1), ("forkserver", 2)])
def test_a_model_is_in_memory_once(fresh: Kernel, method: str, copies: int) -> None:
    """400 MB among 8 workers: once in the kernel; through a forkserver once more for all of its workers."""
    fresh.run(MEASURE)
    cell = fresh.run(
        f"""
without = total_pss(None, True, 8, {method!r})
model = nn.Sequential(*(nn.Linear(5000, 4000) for _ in range(5)))
size = sum(p.numel() * 4 for p in model.parameters())
with_model = total_pss(model, True, 8, {method!r})
size, without, with_model - without
""",
        timeout_s=100,
    )
    size, without, grown = cell.value
    assert size > 400_000_000
    assert grown < (copies + 0.1) * size, (size, without, grown)


def test_two_kernels_launch_at_once(shared: Kernel, fresh: Kernel) -> None:
    train = """
def train():
    import torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.tensor([os.getppid()])
    dist.all_reduce(total)
    return total.item() // 4
[notebook_launcher(train, num_processes=4) for _ in range(3)]
"""
    cells = [kernel.submit(train) for kernel in (shared, fresh)]
    for cell, kernel in zip(cells, (shared, fresh), strict=True):
        assert cell.wait().result == str([kernel.pid] * 3), cell.describe()


def test_what_the_kernel_runs_by_itself_goes_on(shared: Kernel) -> None:
    """Pools, data loaders and temporary folders of the kernel are not the workers' to end."""
    cell = shared.run(
        """
import multiprocessing, tempfile, threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from torch.utils.data import DataLoader
pool = multiprocessing.get_context("fork").Pool(2)
processes = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork"))
threads = ThreadPoolExecutor(2)
folder = tempfile.TemporaryDirectory()
loader = DataLoader(range(64), num_workers=2, persistent_workers=True, multiprocessing_context="fork")
batches = iter(loader)
first = next(batches)
used = pool.map(abs, [-1]), list(processes.map(abs, [-2])), threads.submit(abs, -3).result()

def train():
    import weakref
    class Thing: pass
    thing = Thing()
    weakref.finalize(thing, print, "finalized")   # makes the worker run finalizers at its end
    multiprocessing.active_children()
    return True

launched = [notebook_launcher(train, num_processes=2, start_method=method) for method in ("fork", "forkserver")]
"""
    )
    cell = shared.run(
        "launched, pool.map(abs, [-1]), list(processes.map(abs, [-2])), threads.submit(abs, -3).result(), "
        "os.path.isdir(folder.name), len(list(batches))",
        timeout_s=30,
    )
    assert cell.value == ([True, True], [1], [2], 3, True, 63)
    shared.run(
        "del batches, loader\npool.terminate(); pool.join()\nprocesses.shutdown()\nthreads.shutdown()\nfolder.cleanup()"
    )
