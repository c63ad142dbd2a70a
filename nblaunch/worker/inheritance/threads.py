"""Threads of this process, which do not run in a fork of it.

Some libraries that run threads of their own fail in a fork of a process that has used them. The kernel and the server
of a forkserver check this before they fork workers (``launcher/plan.py``, ``start_methods/forkserver.py``).

A ``QueueHandler`` passes log records to a ``QueueListener``'s thread; a worker restarts that thread for the worker's
first record. In a worker, ``join()`` on any other thread returns at once, because Python marks the threads that a fork
leaves behind as ended. A note says so.

The launcher uses other ways to detect workers that are waiting for a kernel thread (``diagnosis/long_waits.py``).
"""

from __future__ import annotations

import atexit
import mmap
import queue
import re
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from nblaunch import context, packages
from nblaunch.events import Note
from nblaunch.user_code import is_user_file, is_user_function, names_in, reachable_from
from nblaunch.wire.assignment import FunctionCall

_TASKS = Path("/proc/self/task")


@dataclass(frozen=True)
class Library:
    """A library that has its own threads and fails in a fork of a process that has used it.

    Args:
        name: name of its module.
        thread: matches the names of its threads, as Linux shortens them (15 characters).
        flag: a module, and its variable that is true once the library runs threads; for threads without names.
        harm: what a fork would do to a function that uses the library, as the end of a sentence.
        hazard: why a fork is unsafe for all functions, as the end of a sentence; empty if other functions survive it.
    """

    name: str
    thread: str = ""
    flag: tuple[str, str] | None = None
    harm: str = "whose threads a fork does not copy: its first call in a worker would wait forever"
    hazard: str = ""

    def is_running(self) -> bool:
        """Return whether the library runs threads in this process; False if the system does not list threads."""
        if self.name not in sys.modules:
            return False
        if self.flag is not None:
            module, variable = self.flag
            return bool(getattr(sys.modules.get(module), variable, False))
        return any(re.fullmatch(self.thread, name) for name in _thread_names())


_RAY = Library(
    "ray",
    "gcs_client_io_s",
    harm="which this process has already used: forked workers would give their objects the same IDs",
)

_DASK_CLIENTS = ("distributed.client", "_global_clients")

LIBRARIES = (
    # Ray comes before grpc, because it contains grpc. Its threads remain after ray.shutdown().
    _RAY,
    Library("polars", r"polars-\d+"),
    Library(
        "grpc",
        r"event_engine|grpc_global_tim",
        # Its handlers run on every fork (pthread_atfork). In the child, they start its threads again, which abort if
        # the fork has copied an event poller in the middle of a change.
        hazard="gRPC runs threads in this process, and its fork handlers crash some workers, even if their function "
        "does not use gRPC",
    ),
    Library("jax", "tf_XLAEigen"),
    Library("jaxlib", "tf_XLAEigen"),  # the module of jax's arrays and compiled functions
    Library("tensorflow", r"tf_\w+"),
    Library("numba", flag=("numba.np.ufunc.parallel", "_is_initialized")),
    Library("distributed", flag=_DASK_CLIENTS),
    Library("dask", flag=_DASK_CLIENTS),  # its collections compute through a client, if there is one
)

_TOKIO_TASKS = {"tokio-rt-worker", "tokio-runtime-w"}
_FORKABLE = {"tokenizers"}
"""Libraries that contain tokio, but use it only for downloads."""


def find_hazard(call: FunctionCall) -> str | None:
    """Return why a library in this process makes a fork unsafe, as the end of a sentence; None if a fork is safe.

    Args:
        call: the function and its arguments.
    """
    running = [library for library in LIBRARIES if library.is_running()]
    for library in running:
        if library.hazard:
            return f"{library.hazard}; {_end_of_grpc()}"
    if not running and not _runs_tokio():
        return None
    names = _libraries_of(call)
    running += [Library(name) for name in sorted(names) if _runs_tokio() and _is_built_on_tokio(name)]
    used = [library for library in running if library.name in names]
    if used:
        return f"the function uses {used[0].name}, {used[0].harm}"
    loaded = sorted(name for name in names if name in sys.modules)
    for library in running:
        users = [name for name in loaded if _requires(name, library.name)]
        if users:
            return f"the function uses {users[0]}, which requires {library.name}, {library.harm}"
    return None


def _end_of_grpc() -> str:
    """Return when the threads of gRPC end. Ray and pyarrow contain gRPC, whose channels the user does not see."""
    if _RAY.is_running():
        return "Ray keeps such threads until this process ends, and there is nothing to close"
    closed = "forks are safe again once its channels and servers are closed"
    if "pyarrow._flight" in sys.modules:
        return f"{closed}, including the clients and servers of pyarrow.flight"
    return closed


def _thread_names() -> set[str]:
    names: set[str] = set()
    with suppress(OSError):  # no such folder on this system
        for folder in _TASKS.iterdir():
            with suppress(OSError):  # the thread has just ended
                # Linux truncates names after 15 bytes, even within a character.
                names.add((folder / "comm").read_text(encoding="utf-8", errors="replace").strip())
    return names


def _runs_tokio() -> bool:
    """Return whether tokio, a Rust library for asynchronous code, runs threads in this process."""
    return not _TOKIO_TASKS.isdisjoint(_thread_names())


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
    """Return whether a library's metadata lists ``other`` as a requirement, but not only for an extra.

    Libraries may import their requirements late, inside functions, so the loaded modules do not show that a library
    uses another.
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
    """Return the libraries that the user's code in ``call``, or the call's arguments, refer to."""
    return {name for value in reachable_from(call) for name in _names_of_libraries(value)}


def _names_of_libraries(value: Any) -> set[str]:
    """Return the libraries that a value refers to: as a module, by its type, or by names in a function."""
    if issubclass(type(value), ModuleType):
        return {value.__name__.partition(".")[0]}
    if is_user_function(value):
        return set(names_in(value.__code__))
    kind = value if issubclass(type(value), type) else type(value)
    return {str(kind.__module__).partition(".")[0]}


# --- threads that the fork of a worker has left behind ----------------------------------------------------------------

_threads: list[threading.Thread] = []
"""The threads that were running in the kernel when it forked, as seen in a forked worker."""

_listeners: list[Any] = []
"""``QueueListener`` objects whose methods these threads run."""

_reported: set[int] = set()
"""IDs of threads whose joins have been reported."""


def remember() -> None:
    """Record the threads of this process, which is about to fork."""
    _threads[:] = threading.enumerate()
    _threads.remove(threading.current_thread())
    handlers: Any = sys.modules.get("logging.handlers")
    if handlers is not None:
        runners = (getattr(getattr(thread, "_target", None), "__self__", None) for thread in _threads)
        _listeners[:] = [runner for runner in runners if isinstance(runner, handlers.QueueListener)]


def watch() -> None:
    """Restart log listeners in this worker when needed, and report joins of threads that do not run here."""
    if _listeners:
        handlers: Any = sys.modules["logging.handlers"]
        packages.before_first_use(
            handlers.QueueHandler,
            ["handle"],
            lambda handler: _restart_listener(handler.queue),
            includes_new=True,
        )
    if _threads:
        _watch_joins()


def _restart_listener(records: Any) -> None:
    """Start a thread for the listener that reads one of the kernel's queues, if there is such a listener.

    Records in queues that processes share still reach the kernel's listener.
    """
    if not isinstance(records, (queue.Queue, queue.SimpleQueue)):
        return
    for listener in _listeners:
        if listener.queue is records and listener._thread in _threads:
            _empty(records)
            listener._thread = None
            listener.start()
            atexit.register(_stop, listener)
            return


def _empty(records: Any) -> None:
    """Drop the records, which the kernel's own thread handles, and the queue's locks, which that thread may hold."""
    if isinstance(records, queue.Queue):
        queue.Queue.__init__(records, records.maxsize)
        return
    while not records.empty():
        records.get_nowait()


def _stop(listener: Any) -> None:
    if listener._thread is not None:  # the function may have stopped it
        listener.stop()


def _watch_joins() -> None:
    join = threading.Thread.join

    @packages.replaces(threading.Thread, "join")
    def join_here(self: threading.Thread, timeout: float | None = None) -> None:
        if id(self) not in _reported and any(self is thread for thread in _threads):
            caller = sys._getframe(1)
            if is_user_file(caller.f_code.co_filename):
                _reported.add(id(self))
                _report_join(self.name, caller.f_lineno)
        join(self, timeout)


def _report_join(name: str, line: int) -> None:
    here = context.current()
    here.emit(
        Note(
            rank=here.topology.rank,
            kind="warning",
            text=f"line {line} joins the kernel's thread {name!r}, which does not run in a worker, so join() "
            "returns at once, before the thread has done its work. Start the thread inside the function",
        )
    )
