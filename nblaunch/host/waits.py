"""Waits that nothing outside a process can end, read from ``/proc``.

A thread that waits for a lock, a condition, a semaphore or an event of its own process sleeps in the system call
``futex``, with a flag that says that no other process shares the memory it waits on. Without a deadline, only another
thread of the same process can wake it, or a signal handler. If all threads of a process sleep this way, the process
certainly waits forever. A thread that waits for a pipe, a socket, a file, a clock, another process or a lock that
processes share sleeps in another system call, without the flag, or with a deadline.

The main thread may also wait for an object that the calling process has as well, such as a pipe or a semaphore between
processes. Only other processes can then end the wait.

On systems that do not show system calls (no ``/proc``, other processors, a sandbox), this module reports nothing.
"""

from __future__ import annotations

import os
import platform
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nblaunch.host import proc

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1)
_WRITE = {"x86_64": 1, "aarch64": 64}.get(platform.machine(), -1)
"""Numbers of the system calls. Source: syscall tables of Linux, ``asm/unistd.h``."""

_WAITS = (0, 9)  # FUTEX_WAIT, FUTEX_WAIT_BITSET; source: <linux/futex.h>
_PRIVATE, _COMMAND = 0x80, 0x7F  # FUTEX_PRIVATE_FLAG, and the mask that removes flags

BARS_THREAD = "tqdm_monitor"
"""Name of the thread that refreshes tqdm's bars at intervals."""

_SERVERS = ("gloo_tcp_loop", "pt_tcpstore", BARS_THREAD)
"""Threads that serve other threads, such as torch's message threads. They can't end a wait while the
others are idle."""


def name_this_thread(name: str) -> None:
    """Name the calling thread for the system, which keeps 15 characters; do nothing if the system shows no threads."""
    with suppress(OSError):
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)


Wait = tuple[int, str, str]
"""Thread, address that it waits on, number of times that it has gone to sleep."""


@dataclass(frozen=True)
class Waits:
    """The waits of a process whose main thread can be woken only by another of its threads.

    Args:
        main: wait of the main thread. An equal wait later means that the thread has not run in between.
        others: waits of the other threads, if all are of the same kind; None if a thread may continue by itself.
    """

    main: Wait
    others: tuple[Wait, ...] | None

    @property
    def are_endless(self) -> bool:
        """Whether no thread of the process can ever continue."""
        return self.others is not None


def endless_waits(pid: int) -> Waits | None:
    """Return the waits of a process; None if its main thread runs, or something else may wake it."""
    main = _endless_wait(pid, pid)  # usually the only file to read
    if main is None or _may_be_woken_by_signal(pid):
        return None
    return Waits(main, _waits_of_others(pid))


def _waits_of_others(pid: int) -> tuple[Wait, ...] | None:
    try:
        others = [int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid]
    except OSError:  # it has ended
        return None
    waits = []
    for thread in others:
        wait = _endless_wait(pid, thread)
        if wait is not None:
            waits.append(wait)
        elif not proc.read(f"/proc/{pid}/task/{thread}/comm").startswith(_SERVERS):
            return None
    return tuple(waits)


def wait_for_others(pid: int) -> Wait | None:
    """Return the main thread's wait for a write, or for a lock between processes; None if it waits for neither."""
    fields = _system_call(f"/proc/{pid}/task/{pid}")
    if not fields or (fields[0] != str(_WRITE) and not _is_shared_futex(fields)):
        return None
    return pid, fields[1], _num_sleeps(f"/proc/{pid}/task/{pid}")


def has_awaited_object(pid: int) -> bool:
    """Return whether the calling process also has the pipe, socket or semaphore of :func:`wait_for_others`."""
    fields = _system_call(f"/proc/{pid}/task/{pid}")
    if not fields:
        return False
    if fields[0] == str(_WRITE):
        with suppress(OSError):
            target = os.readlink(f"/proc/{pid}/fd/{int(fields[1], 16)}")
            return target.startswith(("pipe:", "socket:")) and target in proc.open_files(
                Path("/proc/self/fd")
            )
        return False
    file = _mapped_file(pid, int(fields[1], 16))
    return bool(file) and file in proc.read("/proc/self/maps")


def _mapped_file(pid: int, address: int) -> str:
    """Return the device, inode and path of the shared memory file mapped at ``address``; empty if there is none."""
    for line in proc.read(f"/proc/{pid}/maps").splitlines():
        # addresses, permissions, offset, device, inode, path; source: proc_pid_maps(5)
        range_, _, _, *file = line.split(maxsplit=5)
        begin, _, end = range_.partition("-")
        if int(begin, 16) <= address < int(end, 16):
            return line[line.index(file[0], len(range_)) :] if file[1] != "0" else ""
    return ""


def _system_call(folder: str) -> list[str]:
    """Return the system call of a waiting thread: number, six arguments, stack pointer, program counter; else empty."""
    fields = proc.read(f"{folder}/syscall").split()
    return fields if len(fields) == 9 else []


def _is_shared_futex(fields: list[str]) -> bool:
    """Return whether a thread waits, without a deadline, for memory that processes share."""
    if fields[0] != str(_FUTEX):
        return False
    operation, deadline = int(fields[2], 16), int(fields[4], 16)
    return operation & _COMMAND in _WAITS and not operation & _PRIVATE and not deadline


def _endless_wait(pid: int, thread: int) -> Wait | None:
    folder = f"/proc/{pid}/task/{thread}"
    fields = _system_call(folder)
    if not fields or fields[0] != str(_FUTEX):
        return None
    address, operation, deadline = fields[1], int(fields[2], 16), int(fields[4], 16)
    if operation & _COMMAND not in _WAITS or not operation & _PRIVATE or deadline:
        return None
    return thread, address, _num_sleeps(folder)


def _num_sleeps(folder: str) -> str:
    """Return how often a thread has gone to sleep. Source: proc_pid_status(5), voluntary_ctxt_switches."""
    return proc.read(f"{folder}/status").partition("\nvoluntary_ctxt_switches:")[2].partition("\n")[0].strip()


_ENDS_NO_WAIT = sum(
    1 << (number - 1)
    for number in (
        signal.SIGINT,
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGABRT,
    )
)
"""Signals that a worker always has handlers for: for an interrupt, and for crashes."""

_CLASSIC = (1 << 31) - 1
"""Signals 1 to 31. The launcher asks for stacks with a higher one, a real-time signal."""


def _may_be_woken_by_signal(pid: int) -> bool:
    """Return whether the process handles signals that clocks, files, other processes or users send."""
    return bool(proc.caught_signals(pid) & _CLASSIC & ~_ENDS_NO_WAIT)
