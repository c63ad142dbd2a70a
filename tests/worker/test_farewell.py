"""The end of a worker: what the end of a script would do is done."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kernels import Kernel

CELL = """
import atexit, threading
from nblaunch import notebook_launcher

def function():
    released = threading.Event()
    def finish():
        released.wait()
        print("thread done")
    threading.Thread(target=finish).start()
    atexit.register(lambda: print("exit handler"))
    threading.main_thread().name  # the function runs in it
    threading.Timer(0.05, released.set).start()

job = notebook_launcher(function, num_processes=2, background={background}, start_method={start_method!r})
"""


@pytest.mark.parametrize("start_method", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("background", [True, False])
def test_threads_are_joined_and_exit_handlers_run(
    kernel: Kernel, background: bool, start_method: str
) -> None:
    kernel.run(CELL.format(background=background, start_method=start_method))
    cell = kernel.run(
        "import nblaunch; nblaunch.last_job().result()\n"
        "print([nblaunch.last_job().logs(rank).split() for rank in range(2)])"
    )
    assert cell.stdout == f"{[['thread', 'done', 'exit', 'handler']] * 2}\n"


LEAVING = """
import os, sys
from pathlib import Path
from nblaunch import notebook_launcher
from nblaunch.backends import process_group

def function(path, how):
    process_group.leave_at_exit = Path(path).touch
    if how == "exit":
        sys.exit(3)
    assert how == "return"
"""


@pytest.mark.parametrize(
    ("how", "error", "leaves"),
    [("return", None, True), ("raise", "AssertionError", False), ("exit", "WorkerDied", False)],
)
def test_only_who_has_done_its_part_leaves_the_group_in_order(
    kernel: Kernel, tmp_path: Path, how: str, error: str | None, leaves: bool
) -> None:
    """NCCL's end of a group waits for what was begun with the other ranks, and they with it, until all are killed."""
    left = tmp_path / "left"
    kernel.run(LEAVING)
    kernel.run(f"notebook_launcher(function, ({str(left)!r}, {how!r}), 1)", raises=error)
    assert left.exists() == leaves
