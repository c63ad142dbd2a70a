"""Connections to other machines that the kernel has open when it forks workers: the first rank has them.

A fork copies the descriptor of a connection, so that all ranks write requests into one stream, and each byte of the
replies reaches one of them: a rank may get the reply to another's request. So the first rank of this machine goes on
with the kernel's connections, and the others find them closed by the other side. Clients that keep connections for
later requests (``requests``, ``httpx``, pools of databases) then open new ones; others raise.

Connections within this machine stay shared: services that several processes write to in turn, such as services of
experiment trackers, run there.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
from collections.abc import Collection
from contextlib import suppress

from nblaunch.worker.inheritance import positions
from nblaunch.worker.inheritance.positions import Identity


def leave_to_first_rank(own: Collection[Identity]) -> None:
    """Close the kernel's connections to other machines in this process; their descriptors stay, at their ends.

    Args:
        own: descriptors that belong to nblaunch.
    """
    fds = [fd for fd in positions.inherited(own) if _is_connected_elsewhere(fd)]
    if not fds:
        return
    closed, other = socket.socketpair()
    with closed, other:
        for fd in fds:
            with suppress(OSError):
                os.dup2(closed.fileno(), fd, inheritable=os.get_inheritable(fd))


def _is_connected_elsewhere(fd: int) -> bool:
    """Return whether ``fd`` is a stream over the network whose other end is not on this machine."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return False
        connection = socket.socket(fileno=fd)
    except OSError:  # closed meanwhile
        return False
    try:
        if connection.type != socket.SOCK_STREAM or connection.family not in (
            socket.AF_INET,
            socket.AF_INET6,
        ):
            return False
        here, there = (_address(name) for name in (connection.getsockname(), connection.getpeername()))
        return here != there and not there.is_loopback
    except (OSError, ValueError):  # it is not connected
        return False
    finally:
        connection.detach()


def _address(name: tuple[str, int]) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(name[0].partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address
