"""Channels by which threads of one process wake each other: pipes, event counters, pairs of sockets.

A thread that waits to read from such channels can't be woken from outside the process if no other process has them.
Thread pools in C++ read from a pipe. Event loops (asyncio, tokio) wait with ``epoll`` for a socket or a counter to
which other threads write. A loop that also waits for a connection, a timer or a signal can continue by itself.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import struct
from collections.abc import Collection, Sequence
from pathlib import Path

from nblaunch.host import proc

_READ = {"x86_64": 0, "aarch64": 63}.get(platform.machine(), -1)
_POLL = {"x86_64": 7}.get(platform.machine(), -1)
_PPOLL = {"x86_64": 271, "aarch64": 73}.get(platform.machine(), -1)
_EPOLL_WAITS = {"x86_64": (232, 281), "aarch64": (22,)}.get(platform.machine(), ())
"""Numbers of the system calls. Source: syscall tables of Linux, ``asm/unistd.h``."""

_NO_TIMEOUT = 0xFFFFFFFF  # -1 as a 32-bit int
_POLLFD = struct.Struct("ihh")  # fd, events, revents; source: poll(2)
_EVENT_COUNTER = "anon_inode:[eventfd]"
_WATCHED = re.compile(r"^tfd: *(\d+)", re.MULTILINE)
_COUNTER_ID = re.compile(r"^eventfd-id: *(\d+)", re.MULTILINE)
"""Lines of ``/proc/N/fdinfo``. Source: proc_pid_fdinfo(5)."""


def awaited_by(pid: int, system_call: Sequence[str]) -> list[str]:
    """Return the channels that a thread waits to read from; empty if it also waits for something else.

    Args:
        pid: process of the thread.
        system_call: the fields of its file ``syscall``.
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
    named = [_names(pid, fd) for fd in fds]
    return [name for names in named for name in names] if all(named) else []


def are_private(pid: int, channels: Collection[str]) -> bool:
    """Return whether no other process has one of these channels.

    Pipes without a writer need no check, because a read from such a pipe ends at once.
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


def _names(pid: int, fd: int) -> list[str]:
    """Return the names of a channel, which all processes that have it share; empty if it is something else."""
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
    """Return the inode of the socket that a socket of this machine is connected to; 0 if there is none."""
    request = _REQUEST.pack(socket.AF_UNIX, 0, 0, _ANY, inode, _SHOW_PEER, _ANY, _ANY)
    header = _HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _IS_REQUEST, 1, 0)
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as asking:
            asking.sendto(header + request, (0, 0))
            reply = asking.recv(4096, socket.MSG_DONTWAIT)  # the system writes it during the call of sendto
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
