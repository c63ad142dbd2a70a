"""Connections that the kernel has open when it forks workers.

A fork copies the descriptor of a connection. All ranks then write requests into one stream, and each byte of a reply
reaches only one of them, so a rank may get the reply to another rank's request.

HTTP clients keep connections for later requests. Each rank replaces these with its own, whatever the machine at the
other end, and leaves the kernel's to the kernel: after a rank had used an encrypted connection, the kernel's next
request would fail.

The first rank of this machine keeps the kernel's other connections to other machines. The other ranks see them closed
by the other side. Clients with connection pools then reconnect; others raise.

Connections within this machine stay shared, because services to which several processes write in turn, such as
experiment trackers, run there.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import sys
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from typing import Any

from nblaunch import packages
from nblaunch.worker.inheritance import positions
from nblaunch.worker.inheritance.positions import Identity


def leave_to_first_rank(channels: Iterable[int]) -> frozenset[Identity]:
    """Replace the kernel's connections to other machines with closed ones, under the same descriptors.

    Args:
        channels: the kernel's open descriptors other than files.

    Returns:
        What these descriptors refer to now.
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
    """Have HTTP clients open new connections in this worker instead of using the kernel's.

    Args:
        channels: the kernel's open channels other than files, and their replacements in this worker.
    """
    for name, renew in _CLIENTS.items():
        # A client whose module is not imported yet has no connection of the kernel.
        if name in sys.modules:
            renew(sys.modules[name], channels)


def _is_kernels(connection: Any, channels: Collection[Identity]) -> bool:
    """Return whether a socket or its wrapper is among the kernel's ``channels``."""
    try:
        status = os.fstat(connection.fileno())
    except (AttributeError, OSError, ValueError):  # no socket, or a closed one
        return False
    return (status.st_dev, status.st_ino) in channels


def _renew_in_library(module: Any, channels: Collection[Identity]) -> None:
    """Close the kernel's connection before a request, so that ``http.client`` connects again."""
    begin = module.HTTPConnection.putrequest

    @packages.replacement_of(begin)
    def begin_here(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_kernels(self.sock, channels):
            self.close()
        return begin(self, *args, **kwargs)

    module.HTTPConnection.putrequest = begin_here


def _renew_in_urllib3(module: Any, channels: Collection[Identity]) -> None:
    """Close the kernel's connection when the pool hands it out, before the pool prepares a proxy."""
    take = module.HTTPConnectionPool._get_conn

    @packages.replacement_of(take)
    def take_here(self: Any, *args: Any, **kwargs: Any) -> Any:
        connection = take(self, *args, **kwargs)
        if _is_kernels(connection.sock, channels):
            connection.close()
        return connection

    module.HTTPConnectionPool._get_conn = take_here


def _renew_in_httpcore(module: Any, channels: Collection[Identity]) -> None:
    """Treat the kernel's connection as expired, so that the pool, which ``httpx`` also uses, opens another."""
    has_expired = module.HTTPConnection.has_expired

    @packages.replacement_of(has_expired)
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
"""Module -> the function that renews its connections."""


def _is_connected_elsewhere(fd: int) -> bool:
    """Return whether ``fd`` is a network stream to another machine."""
    try:
        if not stat.S_ISSOCK(os.fstat(fd).st_mode):
            return False
        connection = socket.socket(fileno=fd)
    except OSError:  # closed in the meantime
        return False
    try:
        if connection.type != socket.SOCK_STREAM or connection.family not in (
            socket.AF_INET,
            socket.AF_INET6,
        ):
            return False
        here, there = (_address(name) for name in (connection.getsockname(), connection.getpeername()))
        return here != there and not there.is_loopback
    except (OSError, ValueError):  # not connected
        return False
    finally:
        connection.detach()


def _address(name: tuple[str, int]) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(name[0].partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address
