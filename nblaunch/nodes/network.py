"""Addresses and network interfaces of this machine."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

import psutil

from nblaunch import env
from nblaunch.backends.base import LOOPBACK
from nblaunch.errors import LaunchError
from nblaunch.launcher.store import StoreHost, family_of
from nblaunch.spec import DEFAULT_PORTS
from nblaunch.topology import Topology

_SOME_OTHER = "192.0.2.1"
"""An address that no machine has; the route to it is the route to other machines. Source: RFC 5737."""


def resolve(host: str, port: int, *, is_shared: bool = True) -> str:
    """Resolve a host name to its first address.

    Args:
        is_shared: whether other machines must be able to reach the host. On Debian and Ubuntu, /etc/hosts maps the
            machine's own name to 127.0.1.1; such a name then resolves to the address on the default route.

    Raises:
        LaunchError: the host is unknown, or no other machine can reach it.
    """
    try:
        addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    except OSError as error:
        raise LaunchError(
            f"the rendezvous is at {host}:{port}, but this machine can't resolve the host {host!r}: {error}"
        ) from error
    if not is_shared or host == "localhost" or _is_loopback(host):
        return addresses[0]
    reachable = [address for address in addresses if not _is_loopback(address)]
    try:
        return reachable[0] if reachable else address_towards(_SOME_OTHER, port)
    except LaunchError as error:
        raise LaunchError(
            f"the rendezvous is at {host}:{port}, but on this machine {host!r} is {addresses[0]}, which no "
            "other machine can reach: set master_addr or rdzv_endpoint to an address that they can reach"
        ) from error


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


def address_towards(address: str, port: int) -> str:
    """Return the address of this machine on the route to ``address``. This sends nothing.

    Raises:
        LaunchError: there is no route.
    """
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError as error:
            raise LaunchError(
                f"no network interface on this machine can reach the rendezvous at {address}: "
                f"{error.strerror}"
            ) from error
        return str(probe.getsockname()[0])


def default_address() -> str:
    """Return the address of this machine on its default route.

    Raises:
        LaunchError: there is no default route.
    """
    return address_towards(_SOME_OTHER, DEFAULT_PORTS["static"])


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has ``address``, an address of this machine; None if there is none."""
    if _is_loopback(address):
        return LOOPBACK
    return next((name for name, local in interface_addresses() if local == address.partition("%")[0]), None)


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


def worker_settings(topology: Topology, address: str) -> dict[str, str | None]:
    """Return environment variables that make workers use the interface through which other nodes reach them.

    Args:
        topology: topology of a worker; for a single node, no variables are needed.
        address: address at which the other nodes reach this machine. Variables that the user has set are kept.
    """
    if topology.num_nodes == 1:
        return {}
    present = env.snapshot()
    chosen = interface_settings(interface_of(address))
    return {name: value for name, value in chosen.items() if name not in present}


def listen(address: str, port: int, *, is_optional: bool) -> StoreHost | None:
    """Open the listening socket of the rendezvous.

    Args:
        is_optional: another node may host the rendezvous; return None if this node can't.

    Raises:
        LaunchError: ``is_optional`` is False, and the address belongs to another machine or the port is in use.
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
            addresses = sorted({local for _, local in interface_addresses()})
            raise LaunchError(
                f"this node hosts the rendezvous, but {address} is not an address of this machine "
                f"({', '.join(addresses)}); set master_addr or rdzv_endpoint to an address that the other nodes "
                "can reach"
            ) from error
        raise


def interface_addresses() -> Iterator[tuple[str, str]]:
    """Yield ``(interface, address)`` for each address of this machine."""
    for interface, addresses in psutil.net_if_addrs().items():
        for entry in addresses:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                # Link-local addresses end with their interface: ``fe80::1%eth0``.
                yield interface, entry.address.partition("%")[0]
