"""A data loader's process dies: torch raises in a SIGCHLD handler, wherever the rank is at that moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from torch.utils.data._utils.signal_handling import _remove_worker_pids, _set_worker_pids

from nblaunch.events import Failed
from nblaunch.worker import failure
from nblaunch.worker.failure import describe_failure
from tests.kernels import Kernel

SETUP = """
import os, signal
from nblaunch import Session, notebook_launcher

def on_child(signum, frame):
    raise RuntimeError("raised by the handler")

class Late(Exception):
    def __str__(self):
        os.kill(os.getpid(), signal.SIGCHLD)
        return "the real one"

class Value:
    def __getstate__(self):
        os.kill(os.getpid(), signal.SIGCHLD)
        return {"x": 5}

def fail():
    signal.signal(signal.SIGCHLD, on_child)
    raise Late

def succeed():
    signal.signal(signal.SIGCHLD, on_child)
    return Value()
"""


def test_child_handler_is_off_while_a_failure_is_reported(kernel: Kernel) -> None:
    kernel.run(SETUP)
    cell = kernel.run("notebook_launcher(fail, num_processes=2)", raises="Late")
    assert "Late: the real one" in cell.raised.text


def test_child_handler_is_off_while_a_value_is_sent(kernel: Kernel) -> None:
    kernel.run(SETUP)
    assert kernel.run("notebook_launcher(succeed, num_processes=2, dashboard='none').x").value == 5


def test_child_handler_is_off_between_commands(kernel: Kernel) -> None:
    kernel.run(SETUP)
    kernel.run(
        """
session = Session(num_processes=1)
session.execute("succeed(); pid = os.getpid()")
(pid,) = session["pid"].values()
os.kill(pid, signal.SIGCHLD)
"""
    )
    assert kernel.run("session.execute('1 + 1')").result == "[0] 2"
    cell = kernel.run("session.execute('os.kill(pid, signal.SIGCHLD)')", raises="RuntimeError")
    assert "raised by the handler" in cell.raised.text
    kernel.run("session.close()")


def test_child_handler_is_off_while_a_session_sends(kernel: Kernel) -> None:
    kernel.run(SETUP)
    kernel.run("session = Session(num_processes=1)")
    assert kernel.run("session.run(succeed).x").value == 5
    kernel.run("session.close()")


@pytest.fixture
def default_handler() -> Iterator[None]:
    """Restore the system's handling of SIGCHLD, because torch may have set a handler."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGCHLD, before)


def _try_get_data(error: BaseException) -> Failed:
    """Describe ``error`` as if torch's method of this name, which reads from a loader's process, had raised it."""
    try:
        raise error
    except BaseException as raised:
        return describe_failure(0, raised)


@pytest.mark.parametrize(
    "error", [ConnectionResetError(104, "reset"), FileNotFoundError(2, "gone"), EOFError()]
)
@pytest.mark.usefixtures("default_handler")
def test_a_loader_death_replaces_its_connection_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failure, "_DEATH_TIMEOUT_S", 30.0)
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    _set_worker_pids(id(process), (process.pid,))
    try:
        os.kill(process.pid, signal.SIGKILL)
        failed = _try_get_data(error)
    finally:
        _remove_worker_pids(id(process))
        process.kill()
        process.wait()
    assert failed.info.type_name == "RuntimeError"
    assert f"DataLoader worker (pid {process.pid}) is killed by signal" in failed.info.message
    assert failed.info.frames[-1].name == "_try_get_data"


def test_other_connection_errors_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure, "_DEATH_TIMEOUT_S", 0.02)
    assert _try_get_data(ConnectionResetError(104, "reset")).info.type_name == "ConnectionResetError"
