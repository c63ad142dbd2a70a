"""Addresses and network interfaces of this machine."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import psutil

from nblaunch.backends.base import LOOPBACK
from nblaunch.errors import LaunchError
from nblaunch.launcher.store import StoreHost, family_of
from nblaunch.spec import DEFAULT_PORTS

_SOME_OTHER = "192.0.2.1"
"""An address that no machine has; its route shows the route to other machines. Source: RFC 5737."""


def resolve(host: str, port: int, *, is_shared: bool = True) -> str:
    """Resolve a host name to its first address.

    Args:
        is_shared: other machines must reach it. A name of this machine that stands for the loopback, as on Debian and
            Ubuntu, whose /etc/hosts has 127.0.1.1 for it, is resolved to the address on the default route then.

    Raises:
        LaunchError: the host is unknown, or no other machine can reach it.
    """
    try:
        found = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except OSError as error:
        raise LaunchError(
            f"the rendezvous is at {host}:{port}, but this machine can't resolve the host {host!r}: {error}"
        ) from error
    if not is_shared or host == "localhost" or _is_loopback(host):
        return found[0]
    reachable = [address for address in found if not _is_loopback(address)]
    try:
        return reachable[0] if reachable else address_towards(_SOME_OTHER, port)
    except LaunchError as error:
        raise LaunchError(
            f"the rendezvous is at {host}:{port}, but on this machine {host!r} is {found[0]}, which no "
            "other machine reaches: set master_addr or rdzv_endpoint to an address that they can reach"
        ) from error


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


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
                f"no network interface of this machine can reach the rendezvous at {address}: "
                f"{error.strerror}"
            ) from error
        return str(probe.getsockname()[0])


def default_address() -> str:
    """Return the address of this machine on its default route.

    Raises:
        LaunchError: it has none.
    """
    return address_towards(_SOME_OTHER, DEFAULT_PORTS["static"])


def interface_of(address: str) -> str | None:
    """Return the name of the interface with an address of this machine; None if there is none."""
    if _is_loopback(address):
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
                f"port {port} on {address} is in use by another process; choose another port for all nodes "
                "with use_port (static) or rdzv_endpoint (c10d)"
            ) from error
        if number == errno.EADDRNOTAVAIL:
            own = sorted({found for _, found in interface_addresses()})
            raise LaunchError(
                f"this node hosts the rendezvous, but {address} is not an address of this machine "
                f"({', '.join(own)}); set master_addr or rdzv_endpoint to an address that the other nodes "
                "can reach"
            ) from error
        raise


def interface_addresses() -> Iterator[tuple[str, str]]:
    """Yield ``(interface, address)`` of this machine."""
    for interface, addresses in psutil.net_if_addrs().items():
        for own in addresses:
            if own.family in (socket.AF_INET, socket.AF_INET6):
                # An address of the link only ends with its interface: ``fe80::1%eth0``.
                yield interface, own.address.partition("%")[0]
