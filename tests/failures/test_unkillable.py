"""Workers that SIGKILL does not end: the cell ends nevertheless, and names the process that was left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.failures.conftest import value_of
from tests.kernels import Kernel
from tests.stuck_folder import StuckFolder, can_be_made

# tests/launcher/test_stopping.py tests the same with a process that only seems not to end.
pytestmark = pytest.mark.skipif(
    not can_be_made(), reason="only root can mount a file system that does not answer"
)

LAUNCH = """
nblaunch.launcher.supervisor.KILL_PATIENCE_S = 1.0
def look():
    print("entered")
    os.stat({path!r} + "/file")
notebook_launcher(look, (), 1, start_method={method!r}, interrupt_grace_s=0.5)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StuckFolder]:
    path = tmp_path / "stuck"
    path.mkdir()
    made = StuckFolder(path)
    yield made
    made.release()


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_the_cell_returns_and_names_the_process(
    folder: StuckFolder, start: Callable[..., Kernel], method: str
) -> None:
    kernel = start()
    cell = kernel.submit(LAUNCH.format(path=str(folder.path), method=method))
    cell.wait_for_text("entered")
    assert folder.is_entered.wait(180)
    for _ in range(6):
        kernel.interrupt()
    assert cell.wait().raised.name == "KeyboardInterrupt"
    kernel.run("pid = nblaunch.last_job().pids[0]")
    pid = value_of(kernel, "pid")
    assert f"rank 0 (pid {pid}) did not end" in cell.raised.value
    assert psutil.Process(pid).status() == psutil.STATUS_DISK_SLEEP

    assert value_of(kernel, "relaunch()") == [3.0, 3.0]
    assert value_of(kernel, "changed(before)").keys() <= {"children"}, "the worker alone"

    kernel.submit("exit()")
    kernel.wait_for_exit()  # closing does not wait for it either
    left = psutil.Process(pid)
    assert left.status() == psutil.STATUS_DISK_SLEEP
    folder.release()
    psutil.wait_procs([left], timeout=30)
    assert not left.is_running()
