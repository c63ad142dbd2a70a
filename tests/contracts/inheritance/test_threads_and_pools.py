"""State in the kernel's threads and processes: pools, compiled code, loaders, log listeners, event loops."""

from __future__ import annotations

from pathlib import Path

from tests.contracts.inheritance.contract import contract
from tests.kernels import Cell, Kernel


def launch(kernel: Kernel, function: str, start_method: str, raises: str | None = None) -> Cell:
    """Launch a function of the kernel in two workers; the cell's value is the list of their return values."""
    return kernel.run(
        f"nblaunch.notebook_launcher({function}, num_processes=2, start_method={start_method!r}, dashboard='none', "
        "return_all=True, on_hang='stop')",
        raises=raises,
    )


@contract("thread pools")
def test_used_executor_runs_tasks_in_a_worker(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        "import nblaunch\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor(2, initializer=len, initargs=('',))\n"
        "assert list(pool.map(abs, [-1] * 4)) == [1] * 4\n"
        "def train(): return list(pool.map(abs, [-1, -2])), pool.submit(len, 'abc').result()"
    )
    assert launch(kernel, "train", start_method).result == "[([1, 2], 3), ([1, 2], 3)]"
    assert kernel.run("train()").result == "([1, 2], 3)"  # the kernel's threads still serve the pool


@contract("thread pools")
def test_multiprocessing_thread_pool_forks_or_is_rejected(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        "import nblaunch\n"
        "from multiprocessing.pool import ThreadPool\n"
        "pool = ThreadPool(2)\n"
        "pool.map(abs, [-1] * 4)\n"
        "def train(): return pool.map(abs, [-1, -2])"
    )
    if start_method == "fork":
        assert launch(kernel, "train", start_method).result == "[[1, 2], [1, 2]]"
    else:
        assert "pool" in launch(kernel, "train", start_method, raises="PayloadError").raised.value
    assert kernel.run("result = train(); pool.terminate(); result").result == "[1, 2]"


@contract("process pools")
def test_an_executor_with_processes_starts_its_own_in_a_worker(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        "import os, nblaunch\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "pool = ProcessPoolExecutor(1)\n"
        "process = pool.submit(os.getpid).result()\n"
        "def train(): return pool.submit(abs, -3).result(), pool.submit(os.getpid).result() == process"
    )
    assert launch(kernel, "train", start_method).result == "[(3, False), (3, False)]"
    assert kernel.run("result = train(); pool.shutdown(); result").result == "(3, True)"


@contract("process pools")
def test_multiprocessing_pool_restarts_after_fork_or_is_rejected(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        "import os, nblaunch, multiprocessing\n"
        "pool = multiprocessing.Pool(1)\n"
        "process = pool.apply(os.getpid)\n"
        "def train(): return pool.apply(abs, [-3]), pool.apply(os.getpid) == process"
    )
    if start_method == "fork":
        assert launch(kernel, "train", start_method).result == "[(3, False), (3, False)]"
    else:
        assert "pool" in launch(kernel, "train", start_method, raises="PayloadError").raised.value
    assert kernel.run("result = train(); pool.terminate(); pool.join(); result").result == "(3, True)"


@contract("process pools", is_slow=True)
def test_processes_of_joblib_are_started_in_a_worker(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        "import os, joblib, nblaunch\n"
        "pool = joblib.Parallel(2)\n"
        "def use(parallel): return sum(parallel(joblib.delayed(abs)(-number) for number in range(5)))\n"
        "pool.__enter__()\n"  # the pool now keeps its processes
        "assert use(pool) == use(joblib.Parallel(2)) == 10\n"
        "def train(): return use(joblib.Parallel(2))\n"
        "def train_with_pool(): return use(pool)"
    )
    assert launch(kernel, "train", start_method).result == "[10, 10]"
    if start_method == "fork":
        assert launch(kernel, "train_with_pool", start_method).result == "[10, 10]"
    assert kernel.run("result = use(pool); pool.__exit__(None, None, None); result").result == "10"


def test_ending_a_pool_in_a_worker_leaves_the_kernels(kernel: Kernel) -> None:
    kernel.run(
        "import nblaunch, multiprocessing\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "pools = multiprocessing.Pool(1), ProcessPoolExecutor(1)\n"
        "def use(): return [list(pool.map(abs, [-1])) for pool in pools]\n"
        "use()\n"
        "def train():\n"
        "    for pool in pools:\n"
        "        with pool: pass\n"
        "    pools[0].join()\n"
        "    return 'ended'"
    )
    assert launch(kernel, "train", "fork").result == "['ended', 'ended']"
    assert (
        kernel.run("result = use(); pools[0].terminate(); pools[1].shutdown(); result").result == "[[1], [1]]"
    )


@contract("compiled functions", is_slow=True)
def test_compiled_functions_and_new_ones_run(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        "import torch, nblaunch\n"
        "double = torch.compile(lambda x: x.sin() * 2, dynamic=True)\n"
        "x = torch.zeros(2)\n"
        "double(x)\n"
        "def train():\n"
        "    triple = torch.compile(lambda x: x.cos() * 3)\n"
        "    return double(x).tolist(), triple(x).tolist()",
    )
    assert launch(kernel, "train", start_method).value == [([0.0, 0.0], [3.0, 3.0])] * 2


@contract("threads")
def test_joining_a_kernel_thread_names_it(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        "import threading, nblaunch\n"
        "stop = threading.Event()\n"
        "thread = threading.Thread(target=stop.wait, name='filler')\n"
        "thread.start()\n"
        "def train(): thread.join()"
    )
    if start_method == "fork":
        shown = kernel.run("nblaunch.notebook_launcher(train, num_processes=2)").shown
        assert "joins the kernel's thread 'filler', which does not run in a worker" in shown
    else:
        assert "thread" in launch(kernel, "train", start_method, raises="PayloadError").raised.value
    kernel.run("stop.set()")


@contract("locks")
def test_a_lock_that_the_kernel_holds_is_named(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        "import threading, nblaunch\n"
        "lock = threading.Lock()\n"
        "lock.acquire()\n"
        "def train():\n"
        "    lock.acquire()"
    )
    if start_method == "fork":
        error = launch(kernel, "train", start_method, raises="JobHung").raised
        assert (
            "ranks 0 and 1 wait for another thread, and the worker has no thread that could end the wait"
            in error.value
        )
        assert "line 5 in train: lock.acquire()" in error.value
        assert "Create the lock" in error.value
        assert "inside the function" in error.value
    else:
        assert "lock" in launch(kernel, "train", start_method, raises="PayloadError").raised.value


def test_briefly_held_locks_are_free_in_workers(kernel: Kernel) -> None:
    kernel.run(
        "import threading, nblaunch\n"
        "lock, stop = threading.Lock(), threading.Event()\n"
        "def draw():\n"
        "    while not stop.wait(0.001):\n"
        "        with lock:\n"
        "            for _ in range(200_000): pass\n"  # longer than Python lets a thread run if another wants to
        "threading.Thread(target=draw).start()\n"
        "def train(): return lock.acquire(timeout=1)"
    )
    kernel.run("launch = lambda: nblaunch.notebook_launcher(train, num_processes=4, return_all=True)")
    assert kernel.run("[launch() for _ in range(5)]").value == [[True] * 4] * 5
    kernel.run("stop.set()")


@contract("data loaders")
def test_loaders_restart_and_their_iterators_are_rejected(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        "import nblaunch\n"
        "from torch.utils.data import DataLoader\n"
        "loader = DataLoader(list(range(8)), num_workers=1, persistent_workers=True)\n"
        "begun = iter(loader)\n"
        "assert next(begun).item() == 0\n"
        "plain = iter(DataLoader(list(range(8))))\n"
        "assert next(plain).item() == 0\n"
        "def train(): return [len(list(loader)) for _ in range(2)]\n"
        "def go_on(): return next(begun)\n"
        "def go_on_without_processes(): return len(list(plain))"
    )
    assert launch(kernel, "train", start_method).result == "[[8, 8], [8, 8]]"
    if start_method == "fork":
        assert launch(kernel, "go_on_without_processes", start_method).result == "[7, 7]"
        error = launch(kernel, "go_on", start_method, raises="RuntimeError").raised
        assert "iter(loader) inside the function" in error.value
    else:
        error = launch(kernel, "go_on", start_method, raises="PayloadError").raised
        assert "begun (" in error.value
        assert "iter(loader) inside the function" in error.value
    assert (
        kernel.run("result = len(list(begun)), len(list(plain)); del begun, loader; result").result
        == "(7, 7)"
    )


@contract("log queue listeners")
def test_records_reach_the_handlers_of_a_listener(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        "import logging.handlers, nblaunch, queue, sys\n"
        "records = queue.Queue()\n"
        "listener = logging.handlers.QueueListener(records, logging.StreamHandler(sys.stdout))\n"
        "listener.start()\n"
        "logging.getLogger('cell').addHandler(logging.handlers.QueueHandler(records))\n"
        "def train():\n"
        "    log = logging.getLogger('cell')\n"
        "    for number in range(10): log.warning('record %d', number)\n"
        "    return len(log.handlers)"
    )
    has_handler = start_method == "fork"
    assert launch(kernel, "train", start_method).result == ("[1, 1]" if has_handler else "[0, 0]")
    # Without a handler, logging itself writes warnings to the rank's output.
    logs = kernel.run(
        "print([sum(f'record {n}' in nblaunch.last_job().logs(r) for n in range(10)) for r in (0, 1)])"
    )
    assert logs.stdout == "[10, 10]\n"
    kernel.run("listener.stop()")


def test_concurrent_first_uses_share_one_pool(kernel: Kernel) -> None:
    kernel.run(
        "import os, multiprocessing, threading, nblaunch\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "pool = multiprocessing.get_context('fork').Pool(2)\n"
        "assert pool.map(abs, [-1] * 4) == [1] * 4\n"
        "def train():\n"
        "    together = threading.Barrier(4)\n"
        "    def use(number):\n"
        "        together.wait()\n"
        "        return pool.map(abs, [-number] * 3)\n"
        "    with ThreadPoolExecutor(4) as threads: return list(threads.map(use, range(4)))"
    )
    expected = [[number] * 3 for number in range(4)]
    assert launch(kernel, "train", "fork").value == [expected, expected]
    kernel.run("pool.terminate(); pool.join()")


def test_records_that_a_handler_holds_are_written_once(kernel: Kernel, tmp_path: Path) -> None:
    kernel.run(
        "import logging.handlers, os, nblaunch\n"
        f"target = logging.FileHandler({str(tmp_path / 'log')!r})\n"
        "holding = logging.handlers.MemoryHandler(1000, target=target)\n"
        "log = logging.getLogger('held')\n"
        "log.addHandler(holding)\n"
        "log.warning('of the kernel')\n"
        "def train(): log.warning('of rank %s', os.environ['RANK'])"
    )
    launch(kernel, "train", "fork")
    kernel.run("holding.flush()")
    assert sorted((tmp_path / "log").read_text().splitlines()) == ["of rank 0", "of rank 1", "of the kernel"]


@contract("event loops")
def test_workers_create_their_own_event_loops(kernel: Kernel, start_method: str) -> None:
    kernel.run(
        "import asyncio, nblaunch\n"
        "async def add(): return await asyncio.get_running_loop().run_in_executor(None, sum, (1, 2))\n"
        "assert await add() == 3\n"
        "def train():\n"
        "    loop = asyncio.new_event_loop()\n"
        "    try: return asyncio.run(add()), loop.run_until_complete(add())\n"
        "    finally: loop.close()"
    )
    assert launch(kernel, "train", start_method).result == "[(3, 3), (3, 3)]"
    assert kernel.run("await add()").result == "3"
