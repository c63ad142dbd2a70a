"""Addresses and network interfaces of this machine."""

from __future__ import annotations

import ctypes
import errno
import socket
import sys
from collections.abc import Iterator
from typing import ClassVar

from nblaunch.backends.base import LOOPBACK
from nblaunch.errors import LaunchError
from nblaunch.launcher.store import StoreHost, family_of


def resolve(host: str, port: int) -> str:
    """Resolve a host name to its first address.

    Raises:
        LaunchError: the host is unknown.
    """
    try:
        return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise LaunchError(
            f"the rendezvous is at {host}:{port}, but this machine can't resolve the host {host!r}: {error}"
        ) from error


def address_towards(address: str, port: int) -> str:
    """Return the address of this machine on the route to ``address``. Nothing is sent.

    Raises:
        LaunchError: there is no route.
    """
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError as error:
            raise LaunchError(
                f"no network interface of this machine reaches the rendezvous at {address}: {error.strerror}"
            ) from error
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the name of the interface with an address of this machine; None if there is none."""
    if address.startswith("127.") or address == "::1":
        return LOOPBACK
    return next((name for name, own in interface_addresses() if own == address.partition("%")[0]), None)


def interface_settings(interface: str | None) -> dict[str, str]:
    """Return environment variables that make gloo, tensorpipe and NCCL use only this interface."""
    if interface is None:
        return {}
    # Source: NCCL user guide, "NCCL_SOCKET_IFNAME": "=" requires an exact match, not a prefix.
    return {
        "GLOO_SOCKET_IFNAME": interface,
        "TP_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": f"={interface}",
    }


def listen(address: str, port: int, *, is_optional: bool) -> StoreHost | None:
    """Open the listening socket of the rendezvous.

    Args:
        is_optional: another node may host the rendezvous; return None if this one can't.

    Raises:
        LaunchError: ``is_optional`` is False, and the address is not of this machine or the port is in use.
    """
    try:
        return StoreHost(address, port)
    except LaunchError as error:
        number = getattr(error.__cause__, "errno", None)
        if is_optional and number in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
            return None
        if number == errno.EADDRINUSE:
            raise LaunchError(
                f"port {port} on {address} is in use by another process; choose another for all nodes with use_port "
                "(static) or rdzv_endpoint (c10d)"
            ) from error
        if number == errno.EADDRNOTAVAIL:
            own = sorted({found for _, found in interface_addresses()})
            raise LaunchError(
                f"this node hosts the rendezvous, but {address} is not an address of this machine "
                f"({', '.join(own)}); set master_addr or rdzv_endpoint to one that the other nodes reach"
            ) from error
        raise


class _Interface(ctypes.Structure):
    """Source: getifaddrs(3), ``struct ifaddrs`` up to ``ifa_addr``."""

    _fields_: ClassVar = [
        ("next", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("flags", ctypes.c_uint),
        ("address", ctypes.c_void_p),
    ]


def interface_addresses() -> Iterator[tuple[str, str]]:
    """Yield ``(interface, address)`` of this machine."""
    library = ctypes.CDLL(None)
    first = ctypes.c_void_p()
    if library.getifaddrs(ctypes.byref(first)) != 0:
        return
    library.freeifaddrs.argtypes = [ctypes.c_void_p]
    try:
        at = first.value
        while at:
            interface = _Interface.from_address(at)
            address = _address_at(interface.address)
            if address is not None:
                yield interface.name.decode(), address
            at = interface.next
    finally:
        library.freeifaddrs(first)


def _address_at(at: int | None) -> str | None:
    """Return the IP address in a ``struct sockaddr``; None for other families."""
    if not at:
        return None
    # Linux: two bytes of family; BSD and macOS: a byte of length, then one of family.
    header = ctypes.string_at(at, 2)
    family = int.from_bytes(header, sys.byteorder) if sys.platform == "linux" else header[1]
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, ctypes.string_at(at + 4, 4))  # after the port
    if family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, ctypes.string_at(at + 8, 16))  # after port and flow label
    return None
