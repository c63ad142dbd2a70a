"""Waits that nothing outside a process can end, read from ``/proc``.

A thread that waits for a lock, a condition, a semaphore or an event of its own process sleeps in the system call
``futex``, with a flag that marks the memory as private to the process. Without a deadline, only a signal
handler or another thread of the same process can wake it. If all threads of a process sleep this way, the process
certainly waits forever. A thread that waits for a pipe, a socket, a file, a clock, another process or a lock that
processes share sleeps in another system call, without the flag, or with a deadline.

Other threads may also wait to read from channels that no other process has (``wake_channels.py``). Some threads only
serve others, and can't end a wait while they are idle.

The main thread may also wait for an object that the calling process has as well, such as a pipe or a shared
semaphore. Only other processes can then end the wait.

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

from nblaunch.host import proc, wake_channels

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1)
_WRITE = {"x86_64": 1, "aarch64": 64}.get(platform.machine(), -1)
"""Numbers of the system calls. Source: syscall tables of Linux, ``asm/unistd.h``."""

_WAITS = (0, 9)  # FUTEX_WAIT, FUTEX_WAIT_BITSET; source: <linux/futex.h>
_PRIVATE, _COMMAND = 0x80, 0x7F  # FUTEX_PRIVATE_FLAG, and the mask that removes flags

_CLOCK = "clock-"
_CLOCKS = (_CLOCK, "jemalloc_bg_thd")
"""Beginnings of the names of threads that refresh a display, flush a file or return memory at intervals. While such a
thread waits for a condition with a deadline, it is idle: what it does after the deadline does not end another thread's
wait.
"""

_SERVERS = ("gloo_tcp_loop", "pt_tcpstore")
"""Torch's message threads. They are idle while the other threads are."""


def name_as_clock(library: str) -> None:
    """Name the calling thread as one that serves a library at intervals; do nothing if the system shows no threads."""
    with suppress(OSError):  # the system keeps 15 characters
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(_CLOCK + library)


Wait = tuple[int, str, str]
"""Thread, address that it waits on, number of times that it has gone to sleep."""


@dataclass(frozen=True)
class Waits:
    """The waits of a process whose main thread can be woken only by another of its threads.

    Args:
        main: wait of the main thread. If a later wait is equal, the thread has not run in the meantime.
        others: waits of the other threads, if all are of the same kind; None if a thread may continue by itself.
    """

    main: Wait
    others: tuple[Wait, ...] | None

    @property
    def are_endless(self) -> bool:
        """Whether no thread of the process can ever continue."""
        return self.others is not None


def endless_waits(pid: int) -> Waits | None:
    """Return the waits of a process; None if its main thread is running, or if something else may wake it."""
    main = _endless_wait(pid, pid)  # usually the only file to read
    if main is None or _may_be_woken_by_signal(pid):
        return None
    return Waits(main, _waits_of_others(pid))


def _waits_of_others(pid: int) -> tuple[Wait, ...] | None:
    try:
        others = [int(name) for name in os.listdir(f"/proc/{pid}/task") if int(name) != pid]
    except OSError:  # it has ended
        return None
    waits: list[Wait] = []
    awaited_channels: set[str] = set()
    for thread in others:
        if (wait := _endless_wait(pid, thread)) is not None:
            waits.append(wait)
        elif awaited := wake_channels.awaited_by(pid, _system_call(f"/proc/{pid}/task/{thread}")):
            waits.append((thread, " ".join(awaited), _num_sleeps(f"/proc/{pid}/task/{thread}")))
            awaited_channels.update(awaited)
        elif not _is_idle_server(pid, thread):
            return None
    # last, because it reads the descriptors of all processes
    return tuple(waits) if not awaited_channels or wake_channels.are_private(pid, awaited_channels) else None


def _is_idle_server(pid: int, thread: int) -> bool:
    name = proc.read(f"/proc/{pid}/task/{thread}/comm")
    if name.startswith(_CLOCKS):
        return _private_wait(pid, thread, has_deadline=True) is not None
    return name.startswith(_SERVERS)


def wait_for_others(pid: int) -> Wait | None:
    """Return the main thread's wait for a write, or for a lock that processes share; None if it waits for neither."""
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
    return _private_wait(pid, thread, has_deadline=False)


def _private_wait(pid: int, thread: int, has_deadline: bool) -> Wait | None:
    """Return a thread's wait for memory of its own process."""
    folder = f"/proc/{pid}/task/{thread}"
    fields = _system_call(folder)
    if not fields or fields[0] != str(_FUTEX):
        return None
    address, operation, deadline = fields[1], int(fields[2], 16), int(fields[4], 16)
    if operation & _COMMAND not in _WAITS or not operation & _PRIVATE or bool(deadline) is not has_deadline:
        return None
    return thread, address, _num_sleeps(folder)


def _num_sleeps(folder: str) -> str:
    """Return how many times a thread has gone to sleep. Source: proc_pid_status(5), voluntary_ctxt_switches."""
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
"""Signals 1 to 31. The launcher asks for stacks with a real-time signal, whose number is higher."""


def _may_be_woken_by_signal(pid: int) -> bool:
    """Return whether the process handles signals that clocks, files, other processes or users send."""
    return bool(proc.caught_signals(pid) & _CLASSIC & ~_ENDS_NO_WAIT)
