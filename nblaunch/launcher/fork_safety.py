"""Decide whether a fork of this process is safe now.

A fork copies the memory of all threads, but only the calling thread runs in the child. In a worker, whatever
other threads were doing never finishes: a lock that a thread held stays locked, and a pool waits for threads
that do not exist.

The backend knows whether the device survives a fork (``Backend.fork_hazard``, ``backends/first_use.py``), and
``worker/inheritance/library_threads.py`` knows which libraries do not.
"""

from __future__ import annotations

import linecache
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from nblaunch.backends.base import Backend
from nblaunch.diagnosis.stacks import Position
from nblaunch.launcher import store
from nblaunch.user_code import cell_name, is_user_file
from nblaunch.wire.assignment import FunctionCall
from nblaunch.worker.inheritance import connections, library_threads


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
    return library_threads.find_hazard(call)


def explain_hang(positions: Sequence[Position]) -> list[str]:
    """Return a line for each library in which workers hang because the fork did not copy its threads.

    Args:
        positions: positions of ranks that were forked from this process.
    """
    files = {frame.filename for position in positions for frame in position.stack}
    return [
        f"{library.name} has threads in the kernel, which a fork does not copy, so a worker that uses it "
        "hangs: launch with start_method='forkserver'"
        for library in library_threads.LIBRARIES
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
