"""The number of shared memory pages that worker and kernel copy.

The count does not depend on the machine's load.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels import Kernel

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="a page is copied at the first write on Linux"),
]

MAX_PAGES = 1600
"""Pages that a worker with an empty function may copy beyond a bare fork. Python 3.11 copied about 1,500."""

MAX_KERNEL_PAGES = 10_000
"""Pages that a kernel may copy during a launch. About 2,500 were counted, and 59,000 with a search of 2 million
objects, twice as many as here.
"""

SCRIPT = """
import concurrent.futures.process, concurrent.futures.thread, logging.handlers, multiprocessing.pool, os, resource
import torch, tqdm.notebook
from nblaunch import notebook_launcher

def nothing():
    pass

def pages(start):
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt
    start()
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt - before

def launch():
    notebook_launcher(nothing, num_processes=2, backend="cpu", start_method="fork", dashboard="none")

def fork():
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)

launch()
print(min(pages(launch) for _ in range(3)) // 2 - min(pages(fork) for _ in range(3)))
"""


def test_a_worker_of_an_empty_function_copies_few_pages() -> None:
    command = [sys.executable, "-c", SCRIPT]
    output = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout
    assert int(output.split()[-1]) <= MAX_PAGES


def test_a_launch_in_its_own_cell_does_not_search_the_heap(kernel: Kernel) -> None:
    kernel.run(
        "import resource, nblaunch\n"
        "def nothing(): pass\n"
        # A search writes to every object, and so to pages that the kernel has shared with workers.
        "objects = [[number] for number in range(1_000_000)]\n"
        "def copied():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    nblaunch.notebook_launcher(nothing, num_processes=1, backend='cpu', dashboard='none')\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "copied()"
    )
    assert max(kernel.run("copied()").value for _ in range(3)) < MAX_KERNEL_PAGES


SCRIPT_OF_A_SERVER = """
import os, resource, sys, nblaunch

log = os.dup(1)  # as ipykernel does, which then captures descriptor 1
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
objects = [[number] for number in range(1_000_000)]

def nothing():
    pass

def copied():
    os.write(log, b"a request\\n")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    nblaunch.notebook_launcher(nothing, num_processes=1, backend="cpu", start_method="fork", dashboard="none")
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

copied()
pages = max(copied() for _ in range(3))
os.write(log, f"{pages}\\n".encode())
"""


def test_a_growing_log_of_the_server_causes_no_search(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    with path.open("w") as log:
        command = ["sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, SCRIPT_OF_A_SERVER]
        subprocess.run(command, stdout=log, timeout=300, check=True)
    assert int(path.read_text().split()[-1]) < MAX_KERNEL_PAGES
