"""Repeated launches in one kernel, and two at once: nothing grows, and the kernel's own processes continue."""

from __future__ import annotations

import pytest

from tests.benchmarks import memory, repeat
from tests.benchmarks.bench import call
from tests.kernels import Kernel
from tests.thorough import thorough


@pytest.mark.slow
def test_launches_do_not_grow_the_kernel(fresh: Kernel) -> None:
    num_launches = 50
    growth = call(fresh, repeat.in_kernel_repeat, True, num_launches)
    assert growth.pop("rss_mb") < repeat.MAX_RSS_MB * num_launches / repeat.NUM_LAUNCHES
    assert all(grown <= 0 for grown in growth.values()), growth


@pytest.mark.slow
@pytest.mark.parametrize(("method", "copies"), [("fork", 1), thorough("forkserver", 2)])
def test_a_model_is_in_memory_once(fresh: Kernel, method: str, copies: int) -> None:
    """8 workers share 400 MB: they exist once in the kernel, and once more for all workers of a forkserver."""
    without, with_model = (memory.total_mb(fresh, method, size) for size in (0, memory.MODEL_MB))
    grown = [more - less for more, less in zip(with_model, without, strict=True)]
    assert max(grown) < (copies + 0.1) * memory.MODEL_MB, (without, with_model)


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


def test_the_kernels_own_processes_continue(shared: Kernel) -> None:
    """Workers must not end the kernel's pools, data loaders and temporary folders."""
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
    )
    assert cell.value == ([True, True], [1], [2], 3, True, 63)
    shared.run(
        "del batches, loader\npool.terminate(); pool.join()\nprocesses.shutdown()\nthreads.shutdown()\nfolder.cleanup()"
    )
