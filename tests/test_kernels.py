"""The kernel helper itself, on which other tests rely."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import zmq
from jupyter_client.manager import KernelManager

from tests.kernels import Kernel, KernelTimeout, LeftBehind
from tests.left_behind import Snapshot

ORPHAN = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
"""


@pytest.fixture(scope="module")
def shared() -> Iterator[Kernel]:
    """Start a kernel for tests that leave it unchanged."""
    with Kernel.start() as kernel:
        yield kernel


def test_a_cell_comes_back_with_all_its_outputs(shared: Kernel) -> None:
    cell = shared.run(
        """
import sys
from IPython.display import HTML, display
print("out")
print("err", file=sys.stderr)
handle = display(HTML("<b>1</b>"), display_id="bold")
handle.update(HTML("<b>2</b>"))
6 * 7
"""
    )
    assert (cell.status, cell.stdout, cell.stderr, cell.result) == ("ok", "out\n", "err\n", "42")
    bold, result = cell.displays
    assert (bold.data["text/html"], bold.display_id, bold.num_updates) == ("<b>2</b>", "bold", 1)
    assert result.is_result
    assert cell.error is None
    assert cell.elapsed_s > 0


def test_an_error_comes_back_as_the_reader_sees_it(shared: Kernel) -> None:
    cell = shared.run("x = 1\nx / 0", raises="ZeroDivisionError")
    assert cell.status == "error"
    assert cell.error is not None
    assert cell.error.value == "division by zero"
    assert any("----> 2 x / 0" in line for line in cell.error.lines)
    assert "\x1b" not in cell.error.text


def test_an_unexpected_outcome_fails_with_the_cell_and_its_output(shared: Kernel) -> None:
    with pytest.raises(AssertionError, match=r"(?s)without an error.*1 / 0.*before.*division by zero"):
        shared.run("print('before')\n1 / 0")
    with pytest.raises(AssertionError, match=r"expected to raise KeyError"):
        shared.run("1 / 0", raises="KeyError")
    with pytest.raises(AssertionError, match=r"expected to raise KeyError"):
        shared.run("pass", raises="KeyError")


def test_a_running_cell_can_be_watched_and_interrupted(shared: Kernel) -> None:
    cell = shared.submit("import time\nprint('begun', flush=True)\ntime.sleep(600)")
    cell.wait_for_text("begun")
    assert not cell.is_done
    shared.interrupt()
    assert cell.wait(20).error is not None
    assert cell.error.name == "KeyboardInterrupt"
    assert shared.run("'still there'").result == "'still there'"


def test_cells_submitted_together_run_one_by_one(shared: Kernel) -> None:
    first, second = shared.submit("a = 1"), shared.submit("a + 1")
    assert second.wait().result == "2"
    assert first.is_done


def test_waiting_for_text_ends_with_the_cell(shared: Kernel) -> None:
    with pytest.raises(AssertionError, match="ended without printing 'never'"):
        shared.submit("print('else')").wait_for_text("never", timeout_s=30)


def test_the_death_of_the_kernel_ends_a_wait(kernel: Kernel) -> None:
    with pytest.raises(AssertionError, match="the kernel died"):
        kernel.run("import os; os._exit(3)")
    assert kernel.wait_for_exit() == 3


def test_a_timeout_shows_where_the_kernel_was() -> None:
    with Kernel.start() as kernel:
        cell = kernel.submit(
            "def stuck():\n    import signal\n    print('now', flush=True)\n    signal.pause()\nstuck()"
        )
        cell.wait_for_text("now")
        with pytest.raises(KernelTimeout, match=r"(?s)waited 0\.2 s for the cell to end.*in stuck"):
            cell.wait(0.2)


def test_a_process_that_left_the_tree_is_found_and_fails_the_close() -> None:
    kernel = Kernel.start()
    kernel.run(ORPHAN)
    (orphan,) = kernel.processes()
    kernel.kill()
    assert orphan.is_running()
    with pytest.raises(LeftBehind, match=f"pid {orphan.pid}"):
        kernel.close(grace_s=0.1)
    assert not orphan.is_running()


def test_processes_can_be_awaited_while_the_kernel_lives(shared: Kernel) -> None:
    shared.run(ORPHAN)
    with pytest.raises(LeftBehind, match="still running"):
        shared.wait_for_no_processes(0.1)
    shared.run("child.kill(); child.wait()")
    shared.wait_for_no_processes()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_all_connections_are_made_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    Kernel.start().close()  # from now on, the fork server's own socket exists
    connect = KernelManager.connect_control

    def connect_slowly(manager: KernelManager) -> zmq.Socket[bytes]:
        # The first attempt comes before the kernel listens, the next one at least this much later.
        manager.context.setsockopt(zmq.RECONNECT_IVL, 1500)
        return connect(manager)

    monkeypatch.setattr(KernelManager, "connect_control", connect_slowly)
    before = Snapshot.take()
    with Kernel.start():
        new = set(Snapshot.take().files.items()) - set(before.files.items())
        assert sum(target.startswith("socket:") for _, target in new) == 4  # shell, IOPub, control, stdin


def test_a_kernel_over_tcp_works_too() -> None:
    with Kernel.start(transport="tcp") as kernel:
        assert kernel.run("1 + 1").result == "2"
