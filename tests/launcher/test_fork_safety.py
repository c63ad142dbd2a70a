"""Conditions under which workers are not forked: libraries with threads in the kernel, or another job's store there."""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from nblaunch import backends, other_debuggers
from nblaunch.diagnosis import long_waits
from nblaunch.diagnosis.stacks import Position, StackFrame
from nblaunch.errors import WorkerDied
from nblaunch.launcher import plan
from nblaunch.notebook import notebook_launcher
from nblaunch.worker.inheritance import threads
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


def takes(model: torch.nn.Module) -> Any:
    return polars


def uses_nothing(*args: object) -> int:
    return len(args)


@pytest.fixture
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run a thread like those of polars after a computation."""
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


def uses_rust() -> Any:
    return rust_library


rust_library = types.ModuleType("rust_library")


def test_a_function_that_uses_a_library_built_on_tokio_is_not_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = types.ModuleType("rust_library.compiled")
    compiled.__file__ = str(tmp_path / "compiled.abi3.so")
    (tmp_path / "compiled.abi3.so").write_bytes(b"\x7fELF...registry/src/tokio-1.40.0/src/runtime\0")
    monkeypatch.setitem(sys.modules, "rust_library", rust_library)
    monkeypatch.setitem(sys.modules, "rust_library.compiled", compiled)
    assert hazard(uses_rust) is None
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "comm").write_bytes(b"tokio-rt-worker\n")
    monkeypatch.setattr(threads, "_TASKS", tmp_path)
    assert "the function uses rust_library" in (hazard(uses_rust) or "")
    assert hazard(uses_nothing) is None


def hazard(function: Any, *args: Any) -> str | None:
    return plan.find_fork_hazard(backends.find("cpu"), (function, args))


@pytest.mark.parametrize(
    ("function", "args"),
    [(uses_module, ()), (imports, ()), (calls, ()), (functools.partial(uses_nothing, Frame()), ()),
     (uses_nothing, (Dataset(),)), (uses_nothing, ([{"data": Dataset()}],))],
)  # fmt: skip
def test_functions_with_unsafe_libraries_are_not_forked(
    running: None, function: Any, args: tuple[Any, ...]
) -> None:
    assert "polars" in (hazard(function, *args) or "")


detector = types.ModuleType("detector")


class Detector:
    """A model of a library that imports polars inside its methods."""


Detector.__module__ = "detector.models"


def uses_detector() -> Any:
    return detector


@pytest.mark.parametrize(("requirement", "is_unsafe"), [
    ("polars>=1", True), ("Polars; python_version >= '3.8'", True), ("polars-plugin", False), ("numpy", False),
    ("polars; extra == 'frames'", False),
])  # fmt: skip
def test_functions_are_not_forked_if_their_libraries_require_an_unsafe_one(
    running: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requirement: str, is_unsafe: bool
) -> None:
    """As in ultralytics, which reads its results with polars after each epoch."""
    (tmp_path / "detector-1.0.dist-info").mkdir()
    (tmp_path / "detector-1.0.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: detector\nVersion: 1.0\nRequires-Dist: {requirement}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "detector", detector)
    threads._requires.cache_clear()
    for function, args in ((uses_detector, ()), (uses_nothing, (Detector(),))):
        assert ("detector, which requires polars" in (hazard(function, *args) or "")) is is_unsafe


def test_a_large_model_does_not_hide_the_library(running: None) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(100)))
    assert "polars" in (hazard(takes, model) or "")
    assert "polars" in (hazard(uses_nothing, [{"data": Dataset()}], model) or "")


def test_functions_without_unsafe_libraries_are_forked(running: None) -> None:
    assert hazard(uses_nothing, 1, [2]) is None


def test_a_library_without_threads_does_not_prevent_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polars", polars)
    assert hazard(uses_module) is None


@pytest.mark.parametrize("other", [None, "zähle Gewichte".encode()[:2]])
def test_other_threads_do_not_hide_a_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: bytes | None
) -> None:
    """One thread ends between the listing and the reading of its name; Linux may cut names within a character."""
    for number, name in (("1", other), ("2", b"polars-0\n"), ("3", other)):
        (tmp_path / number).mkdir()
        if name is not None:
            (tmp_path / number / "comm").write_bytes(name)
    monkeypatch.setattr(threads, "_TASKS", tmp_path)
    monkeypatch.setitem(sys.modules, "polars", polars)
    assert "polars" in (hazard(uses_module) or "")


def imports_ray() -> Any:
    import ray

    return ray


def test_a_process_that_has_left_a_ray_cluster_is_not_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "comm").write_text("gcs_client_io_s\n")
    monkeypatch.setattr(threads, "_TASKS", tmp_path)
    monkeypatch.setitem(sys.modules, "ray", ModuleType("ray"))
    assert "same IDs" in (hazard(imports_ray) or "")
    assert hazard(uses_nothing) is None


def test_a_function_that_takes_only_an_array_of_jax_is_not_forked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "comm").write_text("tf_XLAEigen\n")
    monkeypatch.setattr(threads, "_TASKS", tmp_path)
    monkeypatch.setitem(sys.modules, "jaxlib", ModuleType("jaxlib"))
    array = type("ArrayImpl", (), {"__module__": "jaxlib._jax"})()
    assert "the function uses jaxlib" in (hazard(uses_nothing, array) or "")


@pytest.mark.parametrize("module", ["distributed.client", "dask.array.core"])
def test_a_function_that_uses_a_dask_client_of_the_kernel_is_not_forked(
    monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    client = ModuleType("distributed.client")
    for name in ("distributed", "dask"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "distributed.client", client)
    value = type("OfDask", (), {"__module__": module})()
    client._global_clients = {}  # type: ignore[attr-defined]
    assert hazard(uses_nothing, value) is None
    client._global_clients[0] = object()  # type: ignore[attr-defined]
    assert f"the function uses {module.partition('.')[0]}," in (hazard(uses_nothing, value) or "")
    assert hazard(uses_nothing) is None


def test_a_fork_shows_no_warning_of_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of jax, which warns before each fork, although the launcher forks only functions that don't use it."""

    def warn() -> int:
        warnings.warn("os.fork() is incompatible with multithreaded code", RuntimeWarning, stacklevel=2)
        return 5

    monkeypatch.setattr("posix.fork", warn)
    assert other_debuggers.fork() == 5


def test_a_hang_inside_a_library_names_it(running: None) -> None:
    frame = StackFrame("/usr/lib/python3/site-packages/polars/lazyframe/frame.py", 3, "collect")
    stuck = Position("cell 3, line 2 in train", stack=(frame,))
    (line,) = long_waits.explain_threads_of_libraries([stuck])
    assert "polars" in line
    assert "forkserver" in line
    assert long_waits.explain_threads_of_libraries([Position("cell 3, line 2 in train")]) == []


def reject_as_gnu_openmp_does() -> None:
    os.write(2, b"Terminating: fork() called from a process already using GNU OpenMP, this is unsafe.\n")
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_abort_of_gnu_openmp_is_explained() -> None:
    with pytest.raises(WorkerDied, match="start_method='forkserver'"):
        notebook_launcher(reject_as_gnu_openmp_does, num_processes=1, backend="cpu", dashboard="none")


GRPC_CHANNEL = """
import grpc
channel = grpc.insecure_channel("127.0.0.1:1")
try:
    channel.unary_unary("/service/method")(b"")
except grpc.RpcError as error:
    assert error.code() is grpc.StatusCode.UNAVAILABLE
"""


def test_grpc_in_the_kernel_prevents_a_fork_until_its_channels_are_closed(kernel: Kernel) -> None:
    """This uses the real library: at a fork, its handlers crash one worker in a hundred, whatever its function does."""
    kernel.run(GRPC_CHANNEL)
    kernel.run(
        """
from nblaunch import last_job, notebook_launcher
def connect():
    try:
        grpc.channel_ready_future(grpc.insecure_channel("127.0.0.1:1")).result(timeout=0.1)
    except grpc.FutureTimeoutError:
        return "rejected"
def add():
    return 1 + 1
"""
    )
    for function, value in (("connect", "rejected"), ("add", 2)):
        cell = kernel.run(f"notebook_launcher({function}, num_processes=2), last_job().plan.start_method")
        assert cell.value == (value, "forkserver")
        assert "gRPC runs threads in this process" in cell.shown
    kernel.run(
        "channel.close()\n"
        "from nblaunch.worker.inheritance import threads\n"
        "while threads.find_hazard((add, ())): pass  # its threads end a moment later"
    )
    cell = kernel.run("notebook_launcher(add, num_processes=2), last_job().plan.start_method")
    assert cell.value == (2, "fork")


FLIGHT = """
import grpc, pyarrow.flight
from nblaunch import last_job, notebook_launcher
client = pyarrow.flight.connect("grpc://127.0.0.1:1")
try:
    list(client.list_actions())
except pyarrow.flight.FlightUnavailableError:
    pass
"""
RAY_THREADS = """
import ctypes, ray, threading
def waits(name):
    ctypes.CDLL(None).prctl(15, name)  # PR_SET_NAME
    named.wait(); release.wait()
named, release = threading.Barrier(2), threading.Event()
thread = threading.Thread(target=waits, args=(b"gcs_client_io_s",)); thread.start(); named.wait()
"""


def test_channels_that_libraries_hold_are_not_the_user_s_to_close(kernel: Kernel) -> None:
    """Ray's thread outlives ``ray.shutdown()``; here, another thread has its name, because a cluster starts slowly."""
    kernel.run(FLIGHT)
    launch = "notebook_launcher(lambda: 1, num_processes=1), last_job().plan.start_method"
    cell = kernel.run(launch)
    assert cell.value == (1, "forkserver")
    assert (
        "closed, including the clients and servers of pyarrow.flight; the kernel needs no restart"
        in cell.shown
    )
    kernel.run(RAY_THREADS)
    cell = kernel.run(launch)
    assert cell.value == (1, "forkserver")
    assert "Ray keeps such threads until this process ends" in cell.shown
    assert "closed" not in cell.shown
    kernel.run("release.set(); thread.join(); client.close()")


def test_a_forkserver_does_not_fork_if_the_function_s_module_runs_grpc(
    kernel: Kernel, tmp_path: Path
) -> None:
    (tmp_path / "client_of_a_service.py").write_text(f"{GRPC_CHANNEL}\ndef answer(): return 42\n")
    kernel.run(
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from nblaunch import notebook_launcher; import client_of_a_service"
    )
    cell = kernel.run("notebook_launcher(client_of_a_service.answer, num_processes=2)")
    assert cell.value == 42
    shown = cell.shown
    assert "after a fresh process had loaded the function, gRPC runs threads in this process" in shown
    assert "import the code that uses the library inside the function" in shown


ANOTHER_JOB = """
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
    kernel.run(ANOTHER_JOB)
    kernel.run(
        "job = notebook_launcher(waits, num_processes=2, background=True)\n"
        "while not all('joined' in job.logs(rank) for rank in range(2)): time.sleep(0.01)"
    )
    cell = kernel.run("print(notebook_launcher(parent, num_processes=2) == os.getpid())")
    assert "another job of this process is running" in cell.displays[-1].data["text/plain"]
    assert cell.stdout == "False\n"

    kernel.run("open(release, 'w').close(); assert job.result(200) == os.getpid()")
    cell = kernel.run("print(notebook_launcher(parent, num_processes=2) == os.getpid())")
    assert cell.stdout.splitlines() == ["True"]
