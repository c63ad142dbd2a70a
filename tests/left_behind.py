"""Finds what a test has left behind in the test process: child processes, file descriptors, threads, signals.

It reads ``/proc``, which takes well under a millisecond if nothing is left. Without ``/proc``, it checks only threads.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

GRACE_S = 30.0
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_PROC = Path("/proc/self")

# Resources that a library creates once per process at its first use and keeps: file descriptors by their target,
# threads by their name, processes by a part of their command line.
PROCESS_WIDE_FILES: dict[str, str] = {
    "/dev/urandom": "kept open by OpenSSL and by CPython's fallback for os.urandom",
    "/dev/null": "opened once by psutil and subprocess helpers; holds nothing",
}
PROCESS_WIDE_THREADS: dict[str, str] = {
    "pytest_timeout": "pytest-timeout's own timer, where its method is 'thread'",
}
PROCESS_WIDE_PROCESSES: dict[str, str] = {
    "multiprocessing.resource_tracker": "one per process, ends with it; multiprocessing never stops it",
    "multiprocessing.forkserver": "one per process, ends with it; multiprocessing never stops it",
}


# Process ids and file descriptors that the tests' helpers create at their first use, and that end with the tests.
_kept_processes: set[int] = set()
_kept_files: set[int] = set()


def keep(pid: int, fd: int) -> None:
    """Allow a helper process and its file descriptor to outlive the test that needed it."""
    _kept_processes.add(pid)
    _kept_files.add(fd)


def adopt_orphans() -> None:
    """Make orphaned grandchildren children of this process, so that it sees them. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@dataclass(frozen=True)
class Snapshot:
    """The present resources.

    Args:
        processes: the children, by pid and start time.
        files: the target of each open file descriptor.
        threads: the running Python threads. Native threads are left out, because the pools of OpenMP, autograd and
            others are created at first use and kept.
        signals: the ignored and the blocked signals, which programs of later tests would inherit.
    """

    processes: frozenset[psutil.Process]
    files: dict[int, str]
    threads: frozenset[threading.Thread]
    signals: frozenset[str]

    @classmethod
    def take(cls) -> Snapshot:
        return cls(_children(), _open_files(), frozenset(threading.enumerate()), _inherited_signals())


def find(before: Snapshot, grace_s: float = GRACE_S) -> list[str]:
    """Return a line for each resource that exists now but not ``before``; give ending ones time to end."""
    deadline = time.monotonic() + grace_s
    for thread in _new_threads(before):
        thread.join(max(0.0, deadline - time.monotonic()))
    _wait_for_exit(_new_processes(before), max(0.0, deadline - time.monotonic()))
    if _new_files(before):
        gc.collect()  # a reference cycle, such as the traceback of an expected exception, may keep a file open
    return [
        *(f"process {process.pid}: {_command(process)}" for process in _new_processes(before)),
        *(f"thread {thread.name!r}: {thread!r}" for thread in _new_threads(before)),
        *(f"file descriptor {fd}: {target}" for fd, target in _new_files(before).items()),
        *sorted(_inherited_signals() - before.signals),
    ]


def kill_processes(before: Snapshot) -> None:
    """Kill processes that a test left, so that the next test is not blamed for them."""
    left = _new_processes(before)
    for process in left:
        if process.is_running():
            process.kill()
    _wait_for_exit(left, GRACE_S)


def _new_processes(before: Snapshot) -> list[psutil.Process]:
    new = {process for process in _children() - before.processes if process.pid not in _kept_processes}
    return [p for p in new if not any(known in _command(p) for known in PROCESS_WIDE_PROCESSES)]


def _new_threads(before: Snapshot) -> list[threading.Thread]:
    new = set(threading.enumerate()) - before.threads
    return [t for t in new if not any(known in t.name for known in PROCESS_WIDE_THREADS)]


def _new_files(before: Snapshot) -> dict[int, str]:
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    # Its pipe exists as long as its process. Since Python 3.14, tqdm's first lock starts it.
    pipe = tracker._resource_tracker._fd if tracker is not None else None
    return {
        fd: target
        for fd, target in _open_files().items()
        if before.files.get(fd) != target
        and fd != pipe
        and fd not in _kept_files
        and not any(known in target for known in PROCESS_WIDE_FILES)
    }


def _children() -> frozenset[psutil.Process]:
    """Return running children. Zombies don't count: they may be adopted ones, for which no other process could wait."""
    if not _PROC.exists():
        return frozenset()
    # Lists the children of every thread of this process, without reading all processes of the machine.
    pids = {int(pid) for file in _PROC.glob("task/*/children") for pid in _read(file).split()}
    found = set()
    for pid in pids:
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
        except psutil.NoSuchProcess:
            continue
    return frozenset(found)


def _wait_for_exit(processes: list[psutil.Process], timeout_s: float) -> None:
    """Wait until processes have ended, without waitpid, so that their starters can still read the exit status."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:
            continue
        try:
            # A pidfd becomes readable when its process ends (source: man 2 pidfd_open).
            select.select([pidfd], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(pidfd)


def _open_files() -> dict[int, str]:
    files = {}
    for name in os.listdir("/proc/self/fd") if _PROC.exists() else ():
        try:
            files[int(name)] = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return files


def _inherited_signals() -> frozenset[str]:
    numbers = signal.valid_signals()
    ignored = {number for number in numbers if signal.getsignal(number) is signal.SIG_IGN}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    return frozenset(
        f"signal {getattr(number, 'name', number)}: {what}"
        for what, some in (("ignored", ignored), ("blocked", blocked))
        for number in some
    )


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""  # the thread has ended


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return "(ended)"
