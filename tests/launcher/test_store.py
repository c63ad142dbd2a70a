"""The store of a job: on the loopback interface, started on demand, closed afterwards."""

from __future__ import annotations

import socket

import psutil
import pytest
import torch
from torch.distributed import TCPStore
from torch.torch_version import TorchVersion

from nblaunch.errors import LaunchError
from nblaunch.launcher.store import StoreHost

pytestmark = pytest.mark.usefixtures("first_store")


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("inet")
    return {(c.laddr.ip, c.laddr.port) for c in connections if c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("version", [torch.__version__, TorchVersion("2.7.1")])
def test_a_client_that_comes_before_the_store_is_served(
    version: TorchVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    before = listening()
    host = StoreHost("127.0.0.1", None)
    assert listening() - before == {("127.0.0.1", host.port)}
    early = socket.create_connection(("127.0.0.1", host.port))
    host.start()
    assert host.fileno() == -1
    assert isinstance(host._store, TCPStore)
    assert host._store.libuvBackend == (version >= "2.8"), "up to torch 2.7 that server takes no open socket"
    client = TCPStore("127.0.0.1", host.port, is_master=False, wait_for_workers=False)
    client.set("key", "value")
    assert client.get("key") == b"value"
    assert listening() - before == {("127.0.0.1", host.port)}
    early.close()
    del client
    host.close()
    assert listening() == before


def test_without_a_client_there_is_no_store() -> None:
    before = listening()
    host = StoreHost("127.0.0.1", None)
    host.close()
    host.close()
    assert listening() == before


def test_ports_are_separate_and_reusable() -> None:
    one, two = StoreHost("127.0.0.1", None), StoreHost("127.0.0.1", None)
    assert one.port != two.port
    with pytest.raises(LaunchError, match=f"port {one.port} on 127.0.0.1 is in use"):
        StoreHost("127.0.0.1", one.port)
    one.close()
    two.close()
    again = StoreHost("127.0.0.1", one.port)
    assert again.port == one.port
    again.close()
