"""Libraries with threads of their own in the kernel: workers that use them are not forked, or the hang names them."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from nblaunch import backends
from nblaunch.diagnosis.stacks import Position, StackFrame
from nblaunch.launcher import fork_safety
from tests.kernels import Kernel

_PR_SET_NAME = 15  # source: prctl(2)

polars = ModuleType("polars")


class Frame:
    """An object of the library."""


Frame.__module__ = "polars.frame"


class Dataset:
    def __init__(self) -> None:
        self.frame = Frame()


def uses_module() -> Any:
    return polars


def imports() -> Any:
    import polars as library

    return library


def calls() -> Any:
    return uses_module()


def uses_nothing(*args: object) -> int:
    return len(args)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A thread as polars has them, once it has computed something."""
    ready, done = threading.Event(), threading.Event()

    def wait() -> None:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"polars-0", 0, 0, 0)
        ready.set()
        done.wait()

    monkeypatch.setitem(sys.modules, "polars", polars)
    thread = threading.Thread(target=wait)
    thread.start()
    ready.wait()
    yield
    done.set()
    thread.join()
    while os.path.exists(
        f"/proc/self/task/{thread.native_id}"
    ):  # join() returns a moment before the system's thread ends
        pass


def hazard(function: Any, *args: Any) -> str | None:
    return fork_safety.find_hazard(backends.find("cpu"), (function, args))


@pytest.mark.parametrize(
    ("function", "args"),
    [(uses_module, ()), (imports, ()), (calls, ()), (functools.partial(uses_nothing, Frame()), ()),
     (uses_nothing, (Dataset(),)), (uses_nothing, ([{"data": Dataset()}],))],
)  # fmt: skip
def test_a_function_that_uses_it_is_not_forked(running: None, function: Any, args: tuple[Any, ...]) -> None:
    assert "polars" in (hazard(function, *args) or "")


def test_one_that_does_not_is_forked(running: None) -> None:
    assert hazard(uses_nothing, 1, [2]) is None


def test_so_is_one_where_it_runs_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polars", polars)
    assert hazard(uses_module) is None


@pytest.mark.parametrize("other", [None, "zähle Gewichte".encode()[:2]])
def test_threads_beside_it_hide_it_neither_when_they_end_nor_by_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: bytes | None
) -> None:
    """One ends between the listing of the threads and the look at its name; Linux cuts names within a character."""
    for number, name in (("1", other), ("2", b"polars-0\n"), ("3", other)):
        (tmp_path / number).mkdir()
        if name is not None:
            (tmp_path / number / "comm").write_bytes(name)
    monkeypatch.setattr(fork_safety, "_THREADS", tmp_path)
    monkeypatch.setitem(sys.modules, "polars", polars)
    assert "polars" in (hazard(uses_module) or "")


def test_a_hang_inside_it_names_it(running: None) -> None:
    frame = StackFrame("/usr/lib/python3/site-packages/polars/lazyframe/frame.py", 3, "collect")
    stuck = Position("Cell In[3], line 2 in train", stack=(frame,))
    (line,) = fork_safety.explain_hang([stuck])
    assert "polars" in line
    assert "forkserver" in line
    assert fork_safety.explain_hang([Position("Cell In[3], line 2 in train")]) == []


def test_grpc_used_in_the_kernel(kernel: Kernel) -> None:
    """With the real library: its first call in a forked worker hangs."""
    kernel.run(
        """
import grpc
from nblaunch import last_job, notebook_launcher
def connect():
    try:
        grpc.channel_ready_future(grpc.insecure_channel("127.0.0.1:1")).result(timeout=0.1)
    except grpc.FutureTimeoutError:
        return "refused"
def add():
    return 1 + 1
connect()
"""
    )
    cell = kernel.run("notebook_launcher(connect, num_processes=2), last_job().plan.start_method")
    assert cell.value == ("refused", "forkserver")
    cell = kernel.run("notebook_launcher(add, num_processes=2), last_job().plan.start_method")
    assert cell.value == (2, "fork")
