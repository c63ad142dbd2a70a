"""Decide whether a fork of this process is safe now.

A fork copies the memory of all threads, but only the calling thread runs in the child. In a worker, whatever
other threads were doing never finishes: a lock that a thread held stays locked, and a pool waits for threads
that do not exist.

The backend knows whether the device survives a fork (``Backend.fork_hazard``, ``backends/first_use.py``).
"""

from __future__ import annotations

import linecache
import mmap
import os
import re
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from nblaunch.backends.base import Backend
from nblaunch.diagnosis.stacks import Position
from nblaunch.launcher import store
from nblaunch.user_code import cell_name, is_user_file, is_user_function, names_in, reachable_from
from nblaunch.wire.assignment import FunctionCall
from nblaunch.worker.inheritance import connections

_THREADS = Path("/proc/self/task")


@dataclass(frozen=True)
class _Library:
    """A library that has its own threads and fails in a fork of a process that has used it.

    Args:
        name: name of its module.
        thread: matches the names of its threads, as Linux shortens them (15 characters).
        flag: module and variable that is true once it runs threads, if its threads have no names.
        harm: what a fork would do, as the end of a sentence.
    """

    name: str
    thread: str = ""
    flag: tuple[str, str] | None = None
    harm: str = "whose threads a fork does not copy: its first call in a worker would wait forever"

    def is_running(self) -> bool:
        """Return whether the library runs threads in this process; False if the system does not list threads."""
        if self.name not in sys.modules:
            return False
        if self.flag is not None:
            module, variable = self.flag
            return bool(getattr(sys.modules.get(module), variable, False))
        return any(re.fullmatch(self.thread, name) for name in _thread_names())


_LIBRARIES = (
    # Ray comes before grpc, because it contains grpc. Its threads remain after ray.shutdown().
    _Library(
        "ray",
        "gcs_client_io_s",
        harm="which this process has already used: forked workers would give their objects the same IDs",
    ),
    _Library("polars", r"polars-\d+"),
    _Library("grpc", r"event_engine|grpc_global_tim"),
    _Library("jax", "tf_XLAEigen"),
    _Library("tensorflow", r"tf_\w+"),
    _Library("numba", flag=("numba.np.ufunc.parallel", "_is_initialized")),
)

_TOKIO_THREADS = {"tokio-rt-worker", "tokio-runtime-w"}
_FORKABLE = {"tokenizers"}
"""Libraries that contain tokio, but use it for downloads only."""


def find_hazard(backend: Backend, call: FunctionCall) -> str | None:
    """Return the reason why workers can't be forked from this thread, as the end of a sentence; None if they can.

    Args:
        backend: device family of the workers.
        call: the function and its arguments.
    """
    if not hasattr(os, "fork"):
        return "this system has no fork"
    if sys.platform == "darwin":
        return "Apple's system libraries do not survive a fork"
    if threading.current_thread() is not threading.main_thread():
        return (
            "the launch comes from a thread other than the main thread, and a fork would copy locks that "
            "the main thread holds"
        )
    if store.is_any_store_running():
        return (
            "another job of this process is running, and a fork could copy its store in the middle of a "
            "change"
        )
    hazard = backend.fork_hazard()
    if hazard is not None:
        return hazard + _first_use(backend)
    if connections.has_ray():
        return (
            "this process is connected to a Ray cluster, and a forked worker that calls Ray would end both processes; "
            "workers connect to the cluster themselves"
        )
    running = [library for library in _LIBRARIES if library.is_running()]
    if not running and not _runs_tokio():
        return None
    names = _libraries_of(call)
    running += [_Library(name) for name in sorted(names) if _runs_tokio() and _is_built_on_tokio(name)]
    used = [library for library in running if library.name in names]
    if used:
        return f"the function uses {used[0].name}, {used[0].harm}"
    loaded = sorted(name for name in names if name in sys.modules)
    for library in running:
        users = [name for name in loaded if _requires(name, library.name)]
        if users:
            return f"the function uses {users[0]}, which requires {library.name}, {library.harm}"
    return None


def explain_hang(positions: Sequence[Position]) -> list[str]:
    """Return a line for each library in which workers hang because the fork did not copy its threads.

    Args:
        positions: positions of ranks that were forked from this process.
    """
    files = {frame.filename for position in positions for frame in position.stack}
    return [
        f"{library.name} has threads in the kernel, which a fork does not copy, so a worker that uses it "
        "hangs: launch with start_method='forkserver'"
        for library in _LIBRARIES
        if any(library.name in Path(file).parts for file in files) and library.is_running()
    ]


def _first_use(backend: Backend) -> str:
    """Return the line of the user's own code that first used the device in this process, if it was seen."""
    frames = [frame for frame in backend.first_use() if is_user_file(frame[0])]
    if not frames:
        return ""
    filename, number, _ = frames[0]
    source = linecache.getline(filename, number).strip()
    return f"; it was first used in {cell_name(filename)}, line {number}" + (
        f": `{source:.80}`" if source else ""
    )


def _thread_names() -> set[str]:
    names: set[str] = set()
    with suppress(OSError):  # no such folder on this system
        for folder in _THREADS.iterdir():
            with suppress(OSError):  # the thread has just ended
                # Linux cuts names after 15 bytes, even within a character.
                names.add((folder / "comm").read_text(encoding="utf-8", errors="replace").strip())
    return names


def _runs_tokio() -> bool:
    """Return whether tokio, a Rust library for asynchronous code, runs threads in this process."""
    return not _TOKIO_THREADS.isdisjoint(_thread_names())


def _is_built_on_tokio(library: str) -> bool:
    """Return whether a loaded library contains tokio; False for libraries that survive a fork."""
    if library in _FORKABLE:
        return False
    return any(
        _contains_tokio(file)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == library
        and (file := str(getattr(module, "__file__", None))).endswith(".so")
    )


@lru_cache(maxsize=256)
def _contains_tokio(file: str) -> bool:
    try:
        with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(b"/tokio-") >= 0
    except (OSError, ValueError):  # the file was removed or is empty
        return False


@lru_cache(maxsize=256)
def _requires(library: str, other: str) -> bool:
    """Return whether a library's metadata lists ``other`` as a requirement, other than for an extra.

    Libraries may import their requirements late, inside functions, so their loaded modules do not show the use.
    """
    try:
        requirements = metadata.requires(library) or ()
    except Exception:  # it has no metadata, or its distribution has another name
        return False
    return any(
        re.match(r"[\w.-]+", text)[0].lower() == other and "extra ==" not in text  # type: ignore[index]
        for text in requirements
    )


def _libraries_of(call: FunctionCall) -> set[str]:
    """Return the libraries that the user's code in ``call``, or the arguments of the call, refer to."""
    return {name for value in reachable_from(call) for name in _names_of_libraries(value)}


def _names_of_libraries(value: Any) -> set[str]:
    """Return the libraries that a value refers to: as a module, by its type, or by names in a function."""
    if issubclass(type(value), ModuleType):
        return {value.__name__.partition(".")[0]}
    if is_user_function(value):
        return set(names_in(value.__code__))
    kind = value if issubclass(type(value), type) else type(value)
    return {str(kind.__module__).partition(".")[0]}
