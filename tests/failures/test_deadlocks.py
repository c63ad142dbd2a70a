"""Ranks that wait for a thread that they do not have are named within seconds; other waits are not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.kernels import Kernel

WAITS = {
    "queue.get()": "a queue",
    "task.result()": "a task in a pool",
    "kernels_event.wait()": "another thread",
}
PREPARED = """
import queue as queues, threading, time, torch, nblaunch
from concurrent.futures import ThreadPoolExecutor
from nblaunch import Accelerator, notebook_launcher
queue, kernels_event = queues.Queue(), threading.Event()
pool = ThreadPoolExecutor(1)
task = pool.submit(kernels_event.wait)
"""


def test_waiting_for_a_kernel_thread_ends_the_job(kernel: Kernel) -> None:
    kernel.run(PREPARED)
    for call, what in WAITS.items():
        kernel.run(f"def train():\n    {call}")
        cell = kernel.run("notebook_launcher(train, num_processes=2, on_hang='stop')", raises="JobHung")
        # On a busy machine, one rank begins to wait so late that the job ends before it counts as stuck, too.
        named = (
            rf"(ranks 0 and 1 wait|rank [01] waits) for {what}, and the worker has no thread that could end"
        )
        assert re.search(named, cell.raised.value)
        assert f"line 2 in train: {call}" in cell.raised.value
        assert "A forked worker has none of the kernel's threads" in cell.raised.value
        assert "hang_timeout_s" not in cell.raised.value
    kernel.run("kernels_event.set(); pool.shutdown()")


@pytest.mark.parametrize(
    "before",
    ["Accelerator().reduce(torch.ones(2))", "import tqdm; list(tqdm.tqdm([1]))"],
    ids=["gloo", "tqdm"],
)
def test_an_uncertain_wait_is_only_named(kernel: Kernel, before: str) -> None:
    kernel.run(PREPARED)
    kernel.run(f"def train():\n    {before}\n    queue.get()")
    cell = kernel.submit("notebook_launcher(train, num_processes=2)")
    named = "for a queue, and the worker has no thread that could end the wait."
    cell.wait_for(lambda cell: named in cell.shown, 180, "the report")
    kernel.interrupt()
    assert cell.wait().raised.name == "KeyboardInterrupt"
    kernel.run("kernels_event.set(); pool.shutdown()")


@pytest.mark.parametrize(
    "library",
    [
        "import torch.utils.tensorboard as board; board.SummaryWriter(folder).add_scalar('a', 1)",
        "import rich.progress; rich.progress.Progress().start()",
        "from multiprocessing.pool import ThreadPool; own = ThreadPool(2); own.map(abs, [1])",
        "import pyarrow.csv; pyarrow.csv.read_csv(folder + '/a.csv')",
        "import asyncio; threading.Thread(target=asyncio.new_event_loop().run_forever, daemon=True).start()",
    ],
    ids=["TensorBoard", "rich", "ThreadPool", "pyarrow", "event loop"],
)
def test_idle_threads_of_libraries_hide_no_hang(kernel: Kernel, tmp_path: Path, library: str) -> None:
    """Threads that the worker has started itself wait for their own process, or for a clock to flush or refresh."""
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    kernel.run(PREPARED)
    kernel.run(f"folder = {str(tmp_path)!r}\ndef train():\n    {library}\n    queue.get()")
    cell = kernel.run("notebook_launcher(train, num_processes=2, on_hang='stop')", raises="JobHung")
    assert "could end the wait" in cell.raised.value
    kernel.run("kernels_event.set(); pool.shutdown()")


def test_temporary_waits_are_not_named(kernel: Kernel) -> None:
    """Waits for another rank, a sleeping thread, a clock, a signal, and a lock and a queue between processes, each
    for 2 s.
    """
    kernel.run(PREPARED)
    kernel.run("""
import multiprocessing, signal
lock, late = multiprocessing.Lock(), multiprocessing.Queue()
lock.acquire()

def put_later():
    time.sleep(2)
    late.put(1)
    late.put(1)
    lock.release()

def train():
    accelerator = Accelerator()
    if accelerator.process_index == 0:
        own = threading.Event()
        threading.Timer(2, own.set).start()
        own.wait()
        signal.signal(signal.SIGALRM, lambda *ignored: own.set())
        own.clear()
        signal.alarm(2)
        own.wait()
    accelerator.wait_for_everyone()
    late.get()
    with lock:
        return "went on"
""")
    kernel.run("threading.Timer(4, put_later).start()")
    cell = kernel.run("notebook_launcher(train, num_processes=2, on_hang='stop', return_all=True)")
    assert cell.value == ["went on", "went on"]
    assert "could end the wait" not in cell.shown
    kernel.run("kernels_event.set(); pool.shutdown()")
