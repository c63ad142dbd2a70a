"""A front end's debugger, attached to the kernel as JupyterLab attaches it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contracts.inheritance.contract import contract
from tests.kernels import Kernel

CELL = """
import os, subprocess, sys, threading
from nblaunch import Session, other_debuggers, last_job, notebook_launcher

def look():
    assert sys.gettrace() is None and threading._trace_hook is None
    assert not other_debuggers.is_attached()
    child = subprocess.run([sys.executable, "-c", "print(5)"], capture_output=True, text=True)
    thread = threading.Thread(target=os.getpid)
    thread.start()
    thread.join()
    return os.environ["RANK"], child.stdout
"""


@pytest.fixture(scope="module")
def debugged() -> Iterator[Kernel]:
    with Kernel.start() as kernel:
        kernel.run(CELL)
        kernel.start_debugger()
        assert kernel.run("other_debuggers.is_attached(), sys.gettrace() is not None").value == (True, True)
        yield kernel


@contract("debuggers")
def test_workers_start_without_the_debugger_of_the_kernel(debugged: Kernel, start_method: str) -> None:
    cell = debugged.run(
        f"notebook_launcher(look, num_processes=2, start_method={start_method!r}, return_all=True, dashboard='text')",
    )
    assert cell.value == [("0", "5\n"), ("1", "5\n")]
    assert debugged.run("other_debuggers.is_attached(), sys.gettrace() is not None").value == (True, True)


@pytest.mark.thorough
def test_sessions_start_without_the_debugger_and_say_so_once(debugged: Kernel) -> None:
    debugged.run("other_debuggers._is_noted = False")
    launch = "notebook_launcher(look, num_processes=1, dashboard='text')"
    cells = [debugged.run(launch), debugged.run(launch)]
    assert ["breakpoints set in the front end" in cell.shown for cell in cells] == [True, False]
    session = "with Session(2) as session:\n    values = session.run(look, return_all=True)\nvalues"
    assert debugged.run(session).value == [("0", "5\n"), ("1", "5\n")]


def test_breakpoint_opens_pdb_in_a_worker(debugged: Kernel) -> None:
    debugged.run("def stop():\n    here = 41\n    breakpoint()\n    return here")
    cell = debugged.submit("notebook_launcher(stop, num_processes=1, dashboard='none')", is_typed_into=True)
    cell.type("here += 1")
    cell.type("continue")
    cell.wait()
    assert cell.value == 42


def test_the_inline_engine_keeps_the_debugger(debugged: Kernel) -> None:
    traced = "notebook_launcher(lambda: sys.gettrace() is not None, engine='inline', dashboard='none')"
    assert debugged.run(traced).value is True
