"""Connections that the kernel has open when it forks workers.

A fork copies the descriptor of a connection, so that all ranks write requests into one stream, and each byte of the
replies reaches one of them: a rank may get the reply to another's request.

Clients of HTTP keep a connection for later requests. Each rank opens connections of its own in their place, whatever
the machine at the other end, and leaves the kernel's to the kernel: an encrypted one would fail at the next request of
the kernel if a rank had used it.

Of other connections to other machines, the first rank of this machine goes on with the kernel's, and the others find
them closed by the other side. Clients with pools of connections then open new ones; others raise.

Other connections within this machine stay shared: services that several processes write to in turn, such as services
of experiment trackers, run there.
"""

from __future__ import annotations

import functools
import ipaddress
import os
import socket
import stat
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any

from nblaunch.worker.inheritance import positions
from nblaunch.worker.inheritance.positions import Identity


def leave_to_first_rank(channels: Iterable[int]) -> frozenset[Identity]:
    """Close the kernel's connections to other machines in this process; their descriptors stay, at their ends.

    Args:
        channels: descriptors of what the kernel has open besides files.

    Returns:
        What the descriptors have open now.
    """
    fds = [fd for fd in channels if _is_connected_elsewhere(fd)]
    if not fds:
        return frozenset()
    closed, other = socket.socketpair()
    with closed, other:
        for fd in fds:
            with suppress(OSError):
                os.dup2(closed.fileno(), fd, inheritable=os.get_inheritable(fd))
        return positions.identities([closed.fileno()])


def renew_http(channels: Collection[Identity]) -> None:
    """Have clients of HTTP open connections of their own in this worker, in place of the kernel's.

    Args:
        channels: what the kernel has open besides files, and what stands in its place here.
    """
    for name, renew in _CLIENTS.items():
        # A client has no connection of the kernel where its module is not imported yet.
        if name in sys.modules:
            renew(sys.modules[name], channels)


def _is_kernels(connection: Any, channels: Collection[Identity]) -> bool:
    """Return whether a socket, or what wraps one, is among the kernel's ``channels``."""
    try:
        status = os.fstat(connection.fileno())
    except (AttributeError, OSError, ValueError):  # there is none, or it is closed
        return False
    return (status.st_dev, status.st_ino) in channels


def _renew_in_library(module: Any, channels: Collection[Identity]) -> None:
    """Close the kernel's connection before a request, so that ``http.client`` connects again."""
    begin = module.HTTPConnection.putrequest

    @functools.wraps(begin)
    def begin_here(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_kernels(self.sock, channels):
            self.close()
        return begin(self, *args, **kwargs)

    module.HTTPConnection.putrequest = begin_here


def _renew_in_urllib3(module: Any, channels: Collection[Identity]) -> None:
    """Close the kernel's connection where the pool hands it out, before the pool prepares a proxy."""
    take = module.HTTPConnectionPool._get_conn

    @functools.wraps(take)
    def take_here(self: Any, *args: Any, **kwargs: Any) -> Any:
        connection = take(self, *args, **kwargs)
        if _is_kernels(connection.sock, channels):
            connection.close()
        return connection

    module.HTTPConnectionPool._get_conn = take_here


def _renew_in_httpcore(module: Any, channels: Collection[Identity]) -> None:
    """Count the kernel's connection as expired, so that the pool, which ``httpx`` uses, too, makes another."""
    has_expired = module.HTTPConnection.has_expired

    @functools.wraps(has_expired)
    def has_expired_here(self: Any) -> Any:
        stream = getattr(self._connection, "_network_stream", None)
        used = None if stream is None else stream.get_extra_info("socket")
        return _is_kernels(used, channels) or has_expired(self)

    module.HTTPConnection.has_expired = has_expired_here


_CLIENTS: dict[str, Callable[[Any, Collection[Identity]], None]] = {
    "http.client": _renew_in_library,
    "urllib3.connectionpool": _renew_in_urllib3,
    "httpcore._sync.connection": _renew_in_httpcore,
}
"""Module -> how its connections are renewed."""


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
