"""Addresses of this machine, and listening on only one of them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import SimpleNamespace

import psutil
import pytest

from nblaunch.errors import LaunchError
from nblaunch.nodes import network


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_addresses_come_from_interfaces() -> None:
    known = list(network.interface_addresses())
    assert {name for name, _ in known} <= {name for _, name in socket.if_nameindex()}
    assert "127.0.0.1" in [address for _, address in known]
    for name, address in known:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        # The list contains neither link-layer addresses nor suffixes with interface names.
        socket.inet_pton(family, address)
        if not address.startswith(("127.", "::1", "fe80")):
            assert network.interface_of(address) == name


def test_an_address_of_the_link_is_found_with_its_suffix(monkeypatch: pytest.MonkeyPatch) -> None:
    own = SimpleNamespace(family=socket.AF_INET6, address="fe80::7%eth1")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth1": [own]})
    assert network.interface_of("fe80::7%eth1") == "eth1"
    assert network.interface_of("fe80::7") == "eth1"


def test_all_loopback_addresses_use_one_interface() -> None:
    assert network.interface_of("127.0.0.1") == network.interface_of("127.8.0.1")
    assert network.interface_of("192.0.2.200") is None
    assert network.interface_settings(None) == {}


def test_libraries_get_the_full_interface_name() -> None:
    assert network.interface_settings("eth1") == {
        "GLOO_SOCKET_IFNAME": "eth1",
        "TP_SOCKET_IFNAME": "eth1",
        "NCCL_SOCKET_IFNAME": "=eth1",
    }


def test_the_route_decides_the_local_address() -> None:
    assert network.address_towards("127.0.0.1", 29500) == "127.0.0.1"
    with pytest.raises(LaunchError, match="no network interface"):
        network.address_towards(
            "255.255.255.255", 29500
        )  # a broadcast would need a socket option that is not set


def test_names_are_looked_up() -> None:
    assert network.resolve("localhost", 1) in ("127.0.0.1", "::1")
    with pytest.raises(LaunchError, match=r"resolve.* 'no-such-host\.invalid'"):
        network.resolve("no-such-host.invalid", 29500)


OWN_NAME = ["127.0.1.1"]  # as in /etc/hosts of Debian and Ubuntu


def know(monkeypatch: pytest.MonkeyPatch, addresses: list[str]) -> None:
    """Make every host name resolve to these addresses."""
    entries = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 1)) for address in addresses]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: entries)


@pytest.mark.parametrize(
    ("host", "addresses", "expected"),
    [
        ("machine", [*OWN_NAME, "10.0.0.7"], "10.0.0.7"),
        ("machine", ["::1", "fd00::7"], "fd00::7"),
        ("machine", OWN_NAME, "10.0.0.9"),
        ("localhost", ["127.0.0.1"], "127.0.0.1"),
        ("127.0.1.1", OWN_NAME, "127.0.1.1"),
        ("::1", ["::1"], "::1"),
    ],
)
def test_names_resolve_to_reachable_addresses(
    monkeypatch: pytest.MonkeyPatch, host: str, addresses: list[str], expected: str
) -> None:
    know(monkeypatch, addresses)
    monkeypatch.setattr(network, "address_towards", lambda address, port: "10.0.0.9")
    assert network.resolve(host, 29500) == expected
    assert network.resolve(host, 29500, is_shared=False) == addresses[0]


def test_without_a_network_names_are_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    def reject(address: str, port: int) -> str:
        raise LaunchError("no network interface")

    know(monkeypatch, OWN_NAME)
    monkeypatch.setattr(network, "address_towards", reject)
    with pytest.raises(
        LaunchError, match=r"'machine' is 127\.0\.1\.1, which no other machine can reach: set"
    ):
        network.resolve("machine", 29500)


def test_the_store_listens_on_one_address(taken: int) -> None:
    host = network.listen("127.0.0.1", taken + 1 if taken < 65535 else taken - 1, is_optional=False)
    assert host is not None
    try:
        where = [c.laddr for c in psutil.Process().net_connections("tcp") if c.fd == host.fileno()]
        assert [address.ip for address in where] == ["127.0.0.1"]
    finally:
        host.close()


def test_taken_ports_are_rejected_or_left(taken: int) -> None:
    with pytest.raises(LaunchError, match=f"port {taken} on 127.0.0.1 is in use .* use_port"):
        network.listen("127.0.0.1", taken, is_optional=False)
    assert network.listen("127.0.0.1", taken, is_optional=True) is None


def test_foreign_addresses_are_rejected_with_ours() -> None:
    with pytest.raises(
        LaunchError, match=r"192\.0\.2\.200 is not an address of this machine \(.*127\.0\.0\.1"
    ):
        network.listen("192.0.2.200", 29500, is_optional=False)
    assert network.listen("192.0.2.200", 29500, is_optional=True) is None
