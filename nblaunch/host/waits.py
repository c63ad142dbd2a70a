"""Waits that nothing outside a process can end, read from ``/proc``.

A thread that waits for a lock, a condition, a semaphore or an event of its own process sleeps in the system call
``futex``, with a flag that marks the memory as private to the process. Without a deadline, only a signal
handler or another thread of the same process can wake it. If all threads of a process sleep this way, the process is
certain to wait forever. A thread that is waiting for a pipe, a socket, a file, a clock, another process, or a lock
shared between processes sleeps differently: in another system call, or in ``futex`` without the flag or with a
deadline.

Threads other than the main thread may instead be waiting to read from channels that no other process has open. Some
threads only serve others, and can't end a wait while they are idle.

The main thread may also wait for an object that its process shares with the calling process, such as a pipe or a
semaphore. Only other processes can then end the wait.

On systems that do not show system calls (no ``/proc``, other processors, a sandbox), this module reports nothing.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import socket
import struct
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nblaunch.host import proc

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), -1)
_READ = {"x86_64": 0, "aarch64": 63}.get(platform.machine(), -1)
_WRITE = {"x86_64": 1, "aarch64": 64}.get(platform.machine(), -1)
_POLL = {"x86_64": 7}.get(platform.machine(), -1)
_PPOLL = {"x86_64": 271, "aarch64": 73}.get(platform.machine(), -1)
_EPOLL_WAITS = {"x86_64": (232, 281), "aarch64": (22,)}.get(platform.machine(), ())
"""Numbers of the system calls. Source: syscall tables of Linux, ``asm/unistd.h``."""

_WAITS = (0, 9)  # FUTEX_WAIT, FUTEX_WAIT_BITSET; source: <linux/futex.h>
_PRIVATE, _COMMAND = 0x80, 0x7F  # FUTEX_PRIVATE_FLAG, and the mask that removes flags

_CLOCK = "clock-"
_CLOCKS = (_CLOCK, "jemalloc_bg_thd")
"""Name prefixes of threads that refresh a display, flush a file or return memory at intervals. While such a thread
waits for a condition with a deadline, it is idle: what it does after the deadline does not end another thread's wait.
"""

_SERVERS = ("gloo_tcp_loop", "pt_tcpstore")
"""Torch's message threads. They are idle while the other threads are."""


def name_as_clock(library: str) -> None:
    """Rename the calling thread to mark it as one that serves a library at intervals; do nothing without ``/proc``."""
    with suppress(OSError):  # the system keeps 15 characters
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(_CLOCK + library)


Wait = tuple[int, str, str]
"""The thread, the address that it waits on, and the number of times that it has gone to sleep."""


@dataclass(frozen=True)
class Waits:
    """Waits in a process whose main thread can be woken only by another thread of the same process.

    Args:
        main: the main thread's wait. If a later wait compares equal, the thread has not run in the meantime.
        others: the other threads' waits, if they are all of the same kind; None if a thread may continue by itself.
    """

    main: Wait
    others: tuple[Wait, ...] | None

    @property
    def are_endless(self) -> bool:
        """Whether no thread of the process can ever continue."""
        return self.others is not None


def endless_waits(pid: int) -> Waits | None:
    """Return what a process's threads wait for; None if its main thread is running or something else may wake it."""
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
        elif awaited := _awaited_channels(pid, _system_call(f"/proc/{pid}/task/{thread}")):
            waits.append((thread, " ".join(awaited), _num_sleeps(f"/proc/{pid}/task/{thread}")))
            awaited_channels.update(awaited)
        elif not _is_idle_server(pid, thread):
            return None
    # last, because it reads the descriptors of all processes
    return tuple(waits) if not awaited_channels or _are_private(pid, awaited_channels) else None


def _is_idle_server(pid: int, thread: int) -> bool:
    name = proc.read(f"/proc/{pid}/task/{thread}/comm")
    if name.startswith(_CLOCKS):
        return _private_wait(pid, thread, has_deadline=True) is not None
    return name.startswith(_SERVERS)


def wait_for_others(pid: int) -> Wait | None:
    """Return the main thread's wait if it is blocked in a write, or is waiting for a lock that processes share;
    otherwise None.
    """
    fields = _system_call(f"/proc/{pid}/task/{pid}")
    if not fields or (fields[0] != str(_WRITE) and not _is_shared_futex(fields)):
        return None
    return pid, fields[1], _num_sleeps(f"/proc/{pid}/task/{pid}")


def has_awaited_object(pid: int) -> bool:
    """Return whether the calling process also has the pipe, socket or semaphore that :func:`wait_for_others` has
    found.
    """
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
    """Return a waiting thread's system call: its number, six arguments, the stack pointer and the program counter.
    Return an empty list if the thread is not waiting.
    """
    fields = proc.read(f"{folder}/syscall").split()
    return fields if len(fields) == 9 else []


def _is_shared_futex(fields: list[str]) -> bool:
    """Return whether a thread waits, without a deadline, for a futex in memory that processes share."""
    if fields[0] != str(_FUTEX):
        return False
    operation, deadline = int(fields[2], 16), int(fields[4], 16)
    return operation & _COMMAND in _WAITS and not operation & _PRIVATE and not deadline


def _endless_wait(pid: int, thread: int) -> Wait | None:
    return _private_wait(pid, thread, has_deadline=False)


def _private_wait(pid: int, thread: int, has_deadline: bool) -> Wait | None:
    """Return the thread's wait if it is for a futex of its own process; otherwise None."""
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
"""Signals that a worker always handles: the interrupt signal, and those that report crashes."""

_CLASSIC = (1 << 31) - 1
"""Signals 1 to 31. The launcher asks for stacks with a real-time signal, whose number is higher."""


def _may_be_woken_by_signal(pid: int) -> bool:
    """Return whether the process handles signals that come from timers, files, other processes or users."""
    return bool(proc.caught_signals(pid) & _CLASSIC & ~_ENDS_NO_WAIT)


# --- channels by which threads of one process wake each other --------------------------------------------------------
# A thread that waits to read from pipes, event counters or pairs of sockets can't be woken from outside the process if
# no other process has them. Thread pools in C++ read from a pipe. Event loops (asyncio, tokio) use ``epoll`` to wait
# for a socket or a counter that other threads write to. A loop that also waits for a connection, a timer or a signal
# can continue by itself.

_NO_TIMEOUT = 0xFFFFFFFF  # -1 as a 32-bit int
_POLLFD = struct.Struct("ihh")  # fd, events, revents; source: poll(2)
_EVENT_COUNTER = "anon_inode:[eventfd]"
_WATCHED = re.compile(r"^tfd: *(\d+)", re.MULTILINE)
_COUNTER_ID = re.compile(r"^eventfd-id: *(\d+)", re.MULTILINE)
"""Lines of ``/proc/N/fdinfo``. Source: proc_pid_fdinfo(5)."""


def _awaited_channels(pid: int, system_call: Sequence[str]) -> list[str]:
    """Return the channels that a thread waits to read from; empty if it also waits for something else.

    Args:
        pid: process of the thread.
        system_call: the fields of the thread's ``syscall`` file.
    """
    if not system_call:
        return []
    call, first, second, third, fourth = int(system_call[0]), *(int(field, 16) for field in system_call[1:5])
    if call == _READ:
        fds: Sequence[int] = [first]
    elif (call == _POLL and third == _NO_TIMEOUT) or (call == _PPOLL and not third):
        fds = _polled(pid, first, second)
    elif call in _EPOLL_WAITS and fourth & _NO_TIMEOUT == _NO_TIMEOUT:
        fds = [int(fd) for fd in _WATCHED.findall(proc.read(f"/proc/{pid}/fdinfo/{first}"))]
    else:
        return []
    named = [_names_of_channel(pid, fd) for fd in fds]
    return [name for names in named for name in names] if all(named) else []


def _are_private(pid: int, channels: Collection[str]) -> bool:
    """Return whether no other process has one of these channels.

    Pipes without a writer need no check, because a read from such a pipe ends immediately.
    """
    wanted = set(channels)
    if not wanted <= _all_names(Path(f"/proc/{pid}/fd")):  # the other end of a pair of sockets is elsewhere
        return False
    descendants = proc.descendants(pid)
    for other in proc.all_pids():
        folder = Path(f"/proc/{other}/fd")
        if other in descendants and not os.access(folder, os.R_OK):  # it runs as another user, or has ended
            return False
        if other != pid and not wanted.isdisjoint(_all_names(folder)):
            return False
    return True


def _polled(pid: int, address: int, number: int) -> Sequence[int]:
    """Return the descriptors in an array of ``struct pollfd``; empty if other processes' memory can't be read."""
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            memory.seek(address)
            return [fd for fd, _, _ in _POLLFD.iter_unpack(memory.read(_POLLFD.size * number))]
    except OSError:
        return []


def _names_of_channel(pid: int, fd: int) -> list[str]:
    """Return the names of a channel, which are the same in all processes that have it; empty if it is not a channel."""
    try:
        target = os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:  # the thread or the process has continued
        return []
    if target.startswith("pipe:"):
        return [target]
    if target == _EVENT_COUNTER:
        return _counter(f"/proc/{pid}/fdinfo/{fd}")
    if target.startswith("socket:["):
        peer = _peer_of_local_socket(int(target[len("socket:[") : -1]))
        return [target, f"socket:[{peer}]"] if peer else []
    return []


def _all_names(folder: Path) -> set[str]:
    """Return the names of everything that a process has open, from its folder ``/proc/N/fd``."""
    names = set(proc.open_files(folder))
    if _EVENT_COUNTER in names:
        infos = folder.parent / "fdinfo"
        for fd in os.listdir(infos) if os.access(infos, os.R_OK) else ():
            names.update(_counter(f"{infos}/{fd}"))
    return names


def _counter(info: str) -> list[str]:
    return [f"counter:{number}" for number in _COUNTER_ID.findall(proc.read(info))]


_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr: length, type, flags, sequence, port
_REQUEST = struct.Struct(
    "=BBHIIIII"
)  # struct unix_diag_req: family, protocol, -, states, inode, show, cookie
_ATTRIBUTE = struct.Struct("=HH")  # struct nlattr: length, type
_SOCK_DIAG, _BY_FAMILY, _IS_REQUEST = 4, 20, 1  # NETLINK_SOCK_DIAG, SOCK_DIAG_BY_FAMILY, NLM_F_REQUEST
_SHOW_PEER, _PEER, _ANY = 4, 2, 0xFFFFFFFF  # UDIAG_SHOW_PEER, UNIX_DIAG_PEER
_REPLY_BYTES = 16  # struct unix_diag_msg
"""Source: sock_diag(7), <linux/netlink.h>."""


def _peer_of_local_socket(inode: int) -> int:
    """Return the inode of the peer of a local socket; 0 if the socket has no peer."""
    request = _REQUEST.pack(socket.AF_UNIX, 0, 0, _ANY, inode, _SHOW_PEER, _ANY, _ANY)
    header = _HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _IS_REQUEST, 1, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as asking:
            asking.sendto(header + request, (0, 0))
            reply = asking.recv(4096, socket.MSG_DONTWAIT)  # the system writes it before sendto returns
    except OSError:  # a sandbox does not allow it
        return 0
    length, kind, *_ = _HEADER.unpack_from(reply)
    at = _HEADER.size + _REPLY_BYTES
    while kind == _BY_FAMILY and at + _ATTRIBUTE.size <= min(length, len(reply)):
        size, attribute = _ATTRIBUTE.unpack_from(reply, at)
        if attribute == _PEER:
            return int.from_bytes(reply[at + _ATTRIBUTE.size : at + size], "little")
        at += max(size + 3 & ~3, _ATTRIBUTE.size)
    return 0
