"""A fork must not copy the store of another job that runs in the kernel."""

from __future__ import annotations

from tests.kernels import Kernel

SETUP = """
import os, tempfile, time
import torch.distributed as dist
from nblaunch import notebook_launcher

release = os.path.join(tempfile.mkdtemp(), "release")

def waits():
    dist.init_process_group()
    print("joined")
    while not os.path.exists(release):
        time.sleep(0.01)
    dist.barrier()
    return os.getppid()

def parent():
    return os.getppid()
"""


def test_a_second_job_starts_through_a_forkserver_while_a_store_runs(kernel: Kernel) -> None:
    kernel.run(SETUP)
    kernel.run(
        "job = notebook_launcher(waits, num_processes=2, background=True)\n"
        "while not all('joined' in job.logs(rank) for rank in range(2)): time.sleep(0.01)"
    )
    cell = kernel.run("print(notebook_launcher(parent, num_processes=2) == os.getpid())")
    assert "another job of this process is running" in cell.displays[-1].data["text/plain"]
    assert cell.stdout == "False\n"

    kernel.run("open(release, 'w').close(); assert job.result(30) == os.getpid()")
    cell = kernel.run("print(notebook_launcher(parent, num_processes=2) == os.getpid())")
    assert cell.stdout.splitlines() == ["True"]
