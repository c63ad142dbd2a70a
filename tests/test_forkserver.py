"""Kernels that are forked from a process with torch are like kernels in a new interpreter, except for imports."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.forkserver import TOKEN_LENGTH, TOKEN_VARIABLE, Forkserver
from tests.kernels import Kernel

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kernels are forked on Linux only")

LOOK = """
import gc, os, sys, threading, traceback
{
    "parent": os.getppid(),
    "session": os.getsid(0),
    "folder": os.getcwd(),
    "first argument": sys.argv[1],
    "first import path": sys.path[0],
    "variable": os.environ["NBLAUNCH_GREETING"],
    "namespace": (__name__, sys.modules["__main__"].__dict__ is globals()),
    "imported of the tests": [name for name in sys.modules if name.partition(".")[0] in ("tests", "nblaunch")],
    "started by": int(os.environ["JPY_PARENT_PID"]),
    "frames": [frame.filename for frame in traceback.extract_stack() if "/tests/" in frame.filename],
    "frozen objects": gc.get_freeze_count(),
    "in the main thread": threading.current_thread() is threading.main_thread(),
}
"""


def test_forked_kernels_match_fresh_interpreters(tmp_path: Path) -> None:
    seen = []
    for is_new in (False, True):
        with Kernel.start(cwd=tmp_path, env={"NBLAUNCH_GREETING": "hello"}, is_new=is_new) as kernel:
            looked = kernel.run(LOOK).value
            assert looked.pop("parent") == os.getpid()
            assert looked.pop("session") == kernel.pid
            seen.append(looked)
    assert seen[0] == seen[1]
    assert (seen[0]["folder"], seen[0]["variable"]) == (str(tmp_path), "hello")


def test_only_a_new_interpreter_has_not_imported_torch(kernel: Kernel) -> None:
    assert kernel.run("import sys; 'torch' in sys.modules").value is True
    with Kernel.start(is_new=True) as new:
        assert new.run("import sys; 'torch' in sys.modules").value is False


def test_a_variable_that_imports_read_needs_a_new_interpreter(tmp_path: Path) -> None:
    (tmp_path / "found_here.py").write_text("")
    with Kernel.start(env={"PYTHONPATH": str(tmp_path)}) as kernel:
        assert kernel.run("import found_here, sys; 'torch' in sys.modules").value is False


def test_a_kernels_processes_are_found_by_its_token(kernel: Kernel) -> None:
    kernel.run("import os, signal\nif (pid := os.fork()) == 0:\n    signal.pause()")
    forked = kernel.run("pid").value
    with Kernel.start() as other:
        assert [process.pid for process in kernel.processes()] == [forked]
        assert other.processes() == []
    psutil.Process(forked).kill()
    kernel.run("os.waitpid(pid, 0)")


@pytest.mark.parametrize(
    ("ending", "exit_code"), [("os._exit(3)", 3), ("os.kill(os.getpid(), 9)", -signal.SIGKILL)]
)
def test_a_kernels_exit_code_is_known(kernel: Kernel, ending: str, exit_code: int) -> None:
    kernel.submit(f"import os; {ending}")
    assert kernel.wait_for_exit() == exit_code


def test_late_replies_are_not_mixed_up(tmp_path: Path) -> None:
    server = Forkserver(sys.executable, os.environ)
    env = {**os.environ, TOKEN_VARIABLE: "1" * TOKEN_LENGTH}
    with (tmp_path / "output").open("w+") as output:
        os.kill(server.pid, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            server.run_module("platform", ["late"], env, tmp_path, output.fileno(), limit_s=0.1)
        os.kill(server.pid, signal.SIGCONT)
        process = server.run_module("sysconfig", [], env, tmp_path, output.fileno())
        assert process.wait(180) == 0
        output.seek(0)
        assert "Current installation scheme" in output.read()
    server.close()


def test_kernels_draw_different_random_numbers() -> None:
    draw = "import random, numpy; [random.random(), float(numpy.random.rand())]"
    with Kernel.start() as one, Kernel.start() as other:
        assert not {*one.run(draw).value} & {*other.run(draw).value}
