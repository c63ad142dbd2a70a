"""Workers forked from this process, which inherit the function, its closure and the model without copying.

kernel ── prepare the device family, pause OpenMP pools, freeze the heap,
       │   open this process's memory so that workers can compare weights with it,
       │   hold back signals, let other threads finish their work and release their locks
       ├── fork ──> worker 0: worker/bootstrap.run, never returns
       ├── fork ──> worker 1
       └── let threads and signals through, unfreeze the heap (pools restart when they are needed)

After any parallel CPU operation, the process has a pool of OpenMP threads. A fork copies the pool's bookkeeping but not
its threads, so a child's first parallel operation waits forever for threads that do not exist (pytorch/pytorch#17199,
gcc bug 58378). ``omp_pause_resource_all`` (OpenMP 5.0, section 3.2.44) releases the pools; parent and child start fresh
ones when they next need them.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import ClassVar

from nblaunch import backends, early_imports, other_debuggers
from nblaunch.backends.base import Backend
from nblaunch.errors import LaunchError
from nblaunch.host import heap, proc
from nblaunch.start_methods.saved_call import SavedCall
from nblaunch.start_methods.worker_group import Children, WorkerGroup, kill_and_reap
from nblaunch.wire.assignment import Assignment, FunctionCall
from nblaunch.wire.board import Board
from nblaunch.wire.originals import Originals
from nblaunch.worker import bootstrap, output, process_control
from nblaunch.worker.inheritance import kernel_only, random_states, threads
from nblaunch.worker.inheritance.files import KernelFiles


def start(
    call: FunctionCall, assignments: Sequence[Assignment], board: Board, saved: SavedCall | None
) -> WorkerGroup:
    """Fork from the calling thread, which is the main thread, while no other user code can run."""
    return Children(fork_workers(call, assignments, board))


def fork_workers(call: FunctionCall, assignments: Sequence[Assignment], board: Board) -> dict[int, int]:
    """Fork one worker per assignment; return rank -> process id. Only the parent returns."""
    with _other_threads_finishing() as let_them_run:
        assignments = _prepare(call, assignments)
        load_call = _with_random_state(call)
        with _originals_opened(assignments) as originals:
            files = KernelFiles(_own_fds(assignments, originals), _ranks(assignments))

            def run(assignment: Assignment) -> None:
                let_them_run()
                _run_worker(assignment, assignments, load_call, board, originals, files)

            with heap.frozen(), process_control.signals_blocked(), other_debuggers.kept_out():
                # A thread that has work takes the interpreter's lock, and this thread waits until the lock is free.
                time.sleep(_PAUSE_S)
                files.flush()  # other threads may have written during the pause
                return _fork_all(assignments, run)


def _prepare(call: FunctionCall, assignments: Sequence[Assignment]) -> list[Assignment]:
    """Prepare this process for the forks, and return the assignments for its children.

    This happens before the forks, because every page that a worker writes to is copied.
    """
    output.flush_before_fork()
    _prepare_backend(backends.find(assignments[0].backend))
    early_imports.plan_for(call)
    early_imports.finish()
    is_paused = pause_pools()
    threads.remember()
    kernel_only.remember_children()
    parent_pid = os.getpid()
    return [replace(each, parent_pid=parent_pid, restricts_threads=not is_paused) for each in assignments]


def _fork_all(assignments: Sequence[Assignment], run: Callable[[Assignment], None]) -> dict[int, int]:
    pids: dict[int, int] = {}
    for assignment in assignments:
        try:
            pid = other_debuggers.fork()
        except OSError as error:
            kill_and_reap(pids.values())  # the workers that were already started
            raise LaunchError(_start_error(error, len(pids), len(assignments))) from error
        if pid == 0:
            run(assignment)
        pids[assignment.rank] = pid
    return pids


_PATIENCE_S = 0.4
"""How long a thread may run while another one waits for the interpreter: long enough to finish work that holds a lock,
and longer than the forks take, even on a busy machine. A thread that computes forever delays the forks by this amount
of time.
"""

_PAUSE_S = 1e-4
"""How long this thread sleeps, so that a thread with work can take the interpreter's lock."""


@contextmanager
def _other_threads_finishing() -> Iterator[Callable[[], None]]:
    """Let each Python thread run until it waits, rather than for at most 5 ms (Python's switch interval).

    A worker gets a copy of each lock. The copy stays locked forever if another thread holds the lock at the time of the
    fork. A thread that draws a progress bar ten times a second holds a lock while it draws. With the usual interval,
    Python would switch to this thread while the lock is held, and the fork would copy the locked lock. The block must
    run for a few milliseconds before it forks: threads that are already waiting for the interpreter still use the
    previous interval.

    Yields:
        A function that restores the interval in a forked process.
    """
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(_PATIENCE_S)
    try:
        yield partial(sys.setswitchinterval, interval_s)
    finally:
        sys.setswitchinterval(interval_s)


def _prepare_backend(backend: Backend) -> None:
    try:
        backend.prepare_launcher()
    except RuntimeError as error:
        raise LaunchError(f"workers for {backend.name} can't be started: {error}") from error


def _run_worker(
    assignment: Assignment,
    assignments: Sequence[Assignment],
    load_call: Callable[[], FunctionCall],
    board: Board,
    originals: Originals | None,
    files: KernelFiles,
) -> None:
    """Run the worker in the child. Never returns, whatever happens."""
    try:
        files.renew()
        for other in assignments:
            if other is not assignment:
                for fd in other.own_fds:
                    os.close(fd)
        bootstrap.run(assignment, load_call, board.slot(assignment.rank), originals, files)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _own_fds(assignments: Sequence[Assignment], originals: Originals | None) -> set[int]:
    """Return the descriptors that nblaunch opens for the workers."""
    fds = {fd for assignment in assignments for fd in (*assignment.own_fds, assignment.board_fd)}
    return fds if originals is None else {*fds, originals.fd}


def _ranks(assignments: Sequence[Assignment]) -> range:
    return range(assignments[0].rank, assignments[-1].rank + 1)


def _with_random_state(call: FunctionCall) -> Callable[[], FunctionCall]:
    """Restore ``random`` before the call, because Python reseeds it in every child, unlike NumPy's and torch's
    generators.
    """
    state, unknown = random.getstate(), random_states.unknown_generators()

    def load() -> FunctionCall:
        random.setstate(state)
        random_states.seed_unknown(state, unknown)
        return call

    return load


@contextmanager
def _originals_opened(assignments: Sequence[Assignment]) -> Iterator[Originals | None]:
    """Expose this process's memory to the workers, which compare their weights with it and send only those that have
    changed.
    """
    originals = Originals.of_this_process() if assignments[0].wanted_modules else None
    try:
        yield originals
    finally:
        if originals is not None:
            os.close(originals.fd)


def _start_error(error: OSError, started: int, wanted: int) -> str:
    return (
        f"the system could not start worker {started} of {wanted} (fork: {error.strerror}), so the workers "
        f"that were running ({started}) were stopped. Check the limit on processes (ulimit -u, or the container's pids "
        "limit) and free memory, or use fewer processes."
    )


_PAUSE_HARD = 2  # omp_pause_hard; source: OpenMP 5.0, section 3.2.43
_OWN_MAPS = Path("/proc/self/maps")
_OWN_STATUS = Path("/proc/self/status")
_LIBRARIES_SIZE = re.compile(rb"^VmLib:\s*(\d+)", re.MULTILINE)  # source: proc_pid_status(5)
_LIBRARY = re.compile(r"/lib(?:gomp|omp|iomp5)(?:-[0-9a-f]+)?\.(?:so|dylib)[.0-9]*$")
_DELETED = " (deleted)"  # source: proc_pid_maps(5)


def pause_pools() -> bool:
    """Release the OpenMP pools of the calling thread in every OpenMP library that this process has loaded.

    Returns:
        True if a child may use all its threads: every library was paused, or none is loaded. False if a library could
        not be paused; children must then use one thread.
    """
    were_paused = [_pause(library) for library in _loaded_libraries()]
    return all(were_paused)


def _loaded_libraries() -> tuple[str, ...]:
    """Return paths of loaded OpenMP libraries. torch, scikit-learn and other packages each bring their own copy."""
    global _known
    size = _executable_size()
    if size is None or _known is None or _known[0] != size:
        _known = (size, _find_libraries())
    return _known[1]


def _find_libraries() -> tuple[str, ...]:
    try:
        text = _OWN_MAPS.read_text()
    except OSError:
        torch = sys.modules.get("torch")
        folder = Path(torch.__file__ or "").parent / "lib" if torch is not None else None
        return tuple(str(path) for path in folder.glob("lib*omp*")) if folder else ()
    lines = [line.removesuffix(_DELETED) for line in text.splitlines() if "omp" in line]
    return tuple(sorted({_loaded_name(line) for line in lines if _LIBRARY.search(line)}))


def _loaded_name(line: str) -> str:
    """Return the name under which the library on this line of the memory map was loaded; its path if unknown.

    If ``pip`` has replaced or removed the file, the system finds the loaded copy only by this exact name, such as
    ``/a/b/../lib.so``. For any other name, such as ``/a/lib.so``, it looks for the file.
    """
    info = _SymbolInfo()
    address = ctypes.c_void_p(int(line.partition("-")[0], 16))
    if ctypes.CDLL(None).dladdr(address, ctypes.byref(info)) and info.file_name:
        return os.fsdecode(info.file_name)
    return line[line.index("/") :]


_known: tuple[bytes | None, tuple[str, ...]] | None = None
"""The last list of libraries, with the executable size at that time. Kept because reading the maps of a process with
torch takes a millisecond.
"""


class _SymbolInfo(ctypes.Structure):
    """Source: dladdr(3), ``Dl_info``."""

    _fields_: ClassVar = [
        ("file_name", ctypes.c_char_p),
        ("file_address", ctypes.c_void_p),
        ("symbol_name", ctypes.c_char_p),
        ("symbol_address", ctypes.c_void_p),
    ]


def _executable_size() -> bytes | None:
    """Return how much of this process's memory holds library code; None if the system does not report it.

    The value grows when a library is loaded. nblaunch does not ask the loader for a count, because the loader calls
    back while it holds its lock. A thread that imports a module could wait for that lock while it holds the
    interpreter's lock, which the callback needs.
    """
    match = _LIBRARIES_SIZE.search(proc.read_bytes(_OWN_STATUS))
    return match[1] if match else None


def _pause(library: str) -> bool:
    try:
        return _handle(library).omp_pause_resource_all(_PAUSE_HARD) == 0
    except (OSError, AttributeError):
        return False


@cache
def _handle(library: str) -> ctypes.CDLL:
    # RTLD_NOLOAD returns the copy in use, never a second one.
    return ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
