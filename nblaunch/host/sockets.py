"""Connections from this process to other programs: their addresses, and the processes that serve them."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nblaunch.host import proc

Address = tuple[str, int]
"""The host and port of a TCP socket; for a socket in the file system, its path and 0."""

_CREDENTIALS = struct.Struct("3i")  # process, user, group; source: unix(7), SO_PEERCRED
_TABLES = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_LOCAL, _REMOTE, _INODE = 1, 2, 9
"""Fields in a line of these tables. Source: Documentation/networking/proc_net_tcp.rst in the Linux sources."""

_DIGITS = 8


@dataclass(frozen=True)
class Connection:
    """A connection that this process, as the client, has opened to another program.

    Args:
        fd: its descriptor.
        place: address of the program.
    """

    fd: int
    place: str


@dataclass(frozen=True)
class _Stream:
    """A TCP socket, or a socket in the file system.

    Args:
        fd: its descriptor.
        here: address of this end; empty if it has none.
        there: address of the other end; empty if it has none; None if the socket is not connected.
        server: process that serves a socket in the file system; 0 if unknown.
    """

    fd: int
    here: Address
    there: Address | None
    server: int = 0

    @property
    def is_local(self) -> bool:
        """Whether the other end is on this machine."""
        assert self.there is not None
        if self.server or self.here[0] == self.there[0]:
            return True
        return _ip(self.there[0]).is_loopback


def connections_to_others(fds: Iterable[int]) -> tuple[Connection, ...]:
    """Return the connections that this process has opened to programs that it did not start.

    Connections to this process itself, and connections that others have opened, are left out. Connections within the
    machine are left out if the system does not show which process serves them.

    Args:
        fds: descriptors of this process's sockets.
    """
    streams = [stream for fd in fds if (stream := _stream(fd)) is not None]
    listening = {stream.here[1] for stream in streams if stream.there is None and stream.here[1]}
    ends = {(stream.here, stream.there) for stream in streams}
    clients = [
        stream
        for stream in streams
        if stream.there
        and stream.here[1] not in listening
        # Both ends are in this process.
        and not (stream.is_local and (stream.there, stream.here) in ends)
    ]
    unknown = [stream for stream in clients if stream.is_local]
    ours = _served_by_own_programs(unknown) if unknown else set()
    return tuple(Connection(stream.fd, _place(stream)) for stream in clients if stream.fd not in ours)


def _stream(fd: int) -> _Stream | None:
    """Return the stream socket of a descriptor; None if the socket is of another kind or another program opened it."""
    try:
        connection = socket.socket(fileno=fd)
    except OSError:  # closed in the meantime
        return None
    try:
        if connection.type != socket.SOCK_STREAM:
            return None
        if connection.family == getattr(socket, "AF_UNIX", None):
            return _local_stream(connection)
        if connection.family not in (socket.AF_INET, socket.AF_INET6):
            return None
        here = _tcp_address(connection.getsockname())
        try:
            return _Stream(fd, here, _tcp_address(connection.getpeername()))
        except OSError:  # not connected
            return _Stream(fd, here, None)
    except (OSError, ValueError):
        return None
    finally:
        connection.detach()


def _local_stream(connection: socket.socket) -> _Stream | None:
    is_of_server = bool(connection.getsockname())
    if is_of_server or not hasattr(socket, "SO_PEERCRED"):
        return None
    path = connection.getpeername()
    if not path:  # an end of a socket pair
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    server, _, _ = _CREDENTIALS.unpack(credentials)
    return _Stream(connection.fileno(), ("", 0), (os.fsdecode(path).replace("\0", "@"), 0), server)


def _tcp_address(name: tuple[str, int]) -> Address:
    return str(_ip(name[0])), name[1]


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def _place(stream: _Stream) -> str:
    assert stream.there is not None
    host, port = stream.there
    return f"{host}:{port}" if port else host


def _served_by_own_programs(streams: list[_Stream]) -> set[int]:
    """Return the descriptors of ``streams`` served by this process, by its descendants or by an unknown program."""
    pids = {os.getpid(), *proc.descendants(os.getpid())}
    ours = {stream.fd for stream in streams if stream.server in pids}
    tcp = [stream for stream in streams if not stream.server]
    if not tcp:
        return ours
    inodes = _inodes_of_other_ends()
    targets = {target for pid in pids for target in proc.open_files(Path(f"/proc/{pid}/fd"))}
    for stream in tcp:
        inode = inodes.get((stream.there, stream.here))
        if inode is None or f"socket:[{inode}]" in targets:
            ours.add(stream.fd)
    return ours


def _inodes_of_other_ends() -> dict[tuple[Address | None, Address], str]:
    """Return the inode of each TCP socket on this machine, keyed by its local and remote addresses."""
    inodes: dict[tuple[Address | None, Address], str] = {}
    for table in _TABLES:
        for line in proc.read(table).splitlines()[1:]:
            fields = line.split()
            inodes[_listed_address(fields[_LOCAL]), _listed_address(fields[_REMOTE])] = fields[_INODE]
    return inodes


def _listed_address(text: str) -> Address:
    """Parse an address from the system's table: 4-byte words, printed in this machine's byte order, and a port."""
    host, _, port = text.partition(":")
    words = (int(host[start : start + _DIGITS], 16) for start in range(0, len(host), _DIGITS))
    packed = b"".join(word.to_bytes(_DIGITS // 2, sys.byteorder) for word in words)
    return str(_ip(str(ipaddress.ip_address(packed)))), int(port, 16)
