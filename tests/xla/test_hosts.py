"""A table of TPU hosts: the workers' environment, completed and used by torch_xla's own functions without a network.

``make test-xla-older`` runs it with torch_xla 2.8. Every host is simulated: its chips on the PCI bus, its environment,
and its metadata server's answers, if it has one. Either every worker's environment is complete and right, or the launch
is rejected with the reason.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import pytest
import requests
import torch_xla
from torch_xla._internal import tpu as theirs

from nblaunch import env
from nblaunch.backends import first_use, xla_runtime
from nblaunch.backends.xla import BACKEND
from nblaunch.host import tpu
from nblaunch.launcher.plan import plan_launch
from nblaunch.spec import LaunchSpec
from nblaunch.topology import Topology


@dataclass(frozen=True)
class Host:
    """A simulated TPU host.

    Args:
        kind: kind of its chips on the PCI bus.
        num_chips: number of its chips.
        bounds: bounds of one process per chip; empty if the launch is rejected.
        rejected: part of the reason.
        variables: its environment.
        metadata: answers of its metadata server; None: there is no server.
    """

    kind: str
    num_chips: int
    bounds: str = ""
    rejected: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    metadata: dict[str, str] | None = None


def served(kind: str, bounds: str, hosts: str = "h:0:10.0.0.2") -> dict[str, str]:
    """A metadata server's answers."""
    text = (
        f"ACCELERATOR_TYPE: '{kind}'\nTPU_PROCESS_BOUNDS: '1,1,1'\nTPU_CHIPS_PER_PROCESS_BOUNDS: '{bounds}'\n"
    )
    return {"tpu-env": f"{text}WORKER_ID: '0'\n", "worker-network-endpoints": hosts}


FOUR_HOSTS = ",".join(f"h:{number}:10.0.0.{number}" for number in range(4))
KAGGLE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_PROCESS_BOUNDS": "1,1,1",
    "TPU_PROCESS_ADDRESSES": "local",
    "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,4,1",
    "CLOUD_TPU_TASK_ID": "0",
}
COLAB = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v6e-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_CHIPS_PER_HOST_BOUNDS": "1,1,1",
    "TPU_HOST_BOUNDS": "1,1,1",
}
KNOWS_V7X = "0x0076" in theirs._TPU_PCI_DEVICE_IDS  # torch_xla 2.9
HOSTS = {
    "v2-8": Host("v2 or v3", 4, rejected="two cores each", metadata=served("v2-8", "2,2,1")),
    "v3-8": Host("v2 or v3", 4, rejected="two cores each", metadata=served("v3-8", "2,2,1")),
    "v4-8": Host("v4", 4, "2,2,1", metadata=served("v4-8", "2,2,1")),
    "v5e-1": Host("v5e", 1, "1,1,1", metadata=served("v5litepod-1", "1,1,1")),
    "v5e-4": Host("v5e", 4, "2,2,1", metadata=served("v5litepod-4", "2,2,1")),
    "v5e-8": Host("v5e", 8, "2,4,1", metadata=served("v5litepod-8", "2,4,1")),
    "v5e-16": Host("v5e", 4, rejected="one of 4 hosts", metadata=served("v5litepod-16", "2,2,1", FOUR_HOSTS)),
    "v5e-16 by its type": Host(
        "v5e",
        4,
        rejected="4 of the 16 chips in a TPU slice",
        variables={"TPU_ACCELERATOR_TYPE": "v5litepod-16"},
    ),
    "v5e-16 by its names": Host("v5e", 4, rejected="one of 4", variables={"TPU_WORKER_HOSTNAMES": "a,b,c,d"}),
    "v6e-1": Host("v6e", 1, "1,1,1", metadata=served("v6e-1", "1,1,1")),
    "v6e-4": Host("v6e", 4, "2,2,1", metadata=served("v6e-4", "2,2,1")),
    "v6e-8": Host("v6e", 8, "2,4,1", metadata=served("v6e-8", "2,4,1")),
    "v7x": Host(
        "v7x",
        8,
        "2,2,1,2" if KNOWS_V7X else "",
        "" if KNOWS_V7X else "does not support v7x",
        metadata=served("tpu7x-8", "2,2,1"),
    ),
    "half a v7x": Host(
        "v7x",
        4,
        rejected="mesh of 4" if KNOWS_V7X else "does not know",
        metadata=served("tpu7x-4", "2,1,1"),
    ),
    "v7x without a server": Host(
        "v7x", 8, rejected="only meshes of three dimensions" if KNOWS_V7X else "does not know"
    ),
    "Kaggle v5e-8": Host("v5e", 8, "2,4,1", variables=KAGGLE),
    "Colab v6e-1": Host("v6e", 1, "1,1,1", variables=COLAB),
    "without a server": Host("v5e", 8, "2,4,1"),
    "without a server or a type": Host("v6e", 4, "2,2,1", variables={"TPU_SKIP_MDS_QUERY": "1"}),
    "unknown": Host("", 4, rejected="kind of TPU is unknown"),
}
RUN = [name for name, host in HOSTS.items() if host.bounds]


@pytest.fixture
def host(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    """Simulate this host for nblaunch and for torch_xla."""
    made_up = HOSTS[request.param]

    def get_metadata(key: str) -> str:
        if made_up.metadata is None:
            raise requests.ConnectionError("no metadata server")
        return made_up.metadata[key]

    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if "TPU" in name or name == "PJRT_DEVICE"]:
            del os.environ[name]
        os.environ.update(made_up.variables)
        monkeypatch.setattr(
            tpu, "chips", lambda: Counter({made_up.kind: made_up.num_chips} if made_up.kind else {})
        )
        monkeypatch.setattr(tpu, "lock_holder", lambda: None)
        monkeypatch.setattr(xla_runtime, "num_chips", lambda: made_up.num_chips)
        monkeypatch.setattr(tpu, "ask_metadata_server", (made_up.metadata or {}).get)
        monkeypatch.setattr(xla_runtime, "version_mismatch", lambda: None)
        monkeypatch.setattr(first_use, "is_xla_initialised", lambda: False)
        monkeypatch.setattr(theirs, "num_available_chips", lambda: made_up.num_chips)
        monkeypatch.setattr(theirs, "_get_metadata", get_metadata)
        yield made_up
    assert not torch_xla._XLAC._xla_runtime_is_initialized()


@pytest.mark.parametrize("host", RUN, indirect=True)
def test_every_worker_gets_the_variables_that_torch_xla_needs(host: Host) -> None:
    count = BACKEND.device_count()
    assert count == host.num_chips
    assert BACKEND.launch_problem() is None
    assert BACKEND.count_problem(count) is None
    for rank in range(count):
        with mock.patch.dict(os.environ):
            ours = BACKEND.worker_env(Topology(rank, rank, 0, count, count, master_port=1))
            env.apply(ours)
            # The import of torch_xla does this on a host with chips, and its rendezvous in a worker.
            assert theirs.version() in (4, 5, 6, 7)
            if count > 1:
                theirs.configure_topology(rank, count)
                once = dict(os.environ)
                theirs.configure_topology(rank, count)  # plain torch_xla in a worker, and then an Accelerator
                assert dict(os.environ) == once
            else:
                theirs.configure_one_chip_topology()
            assert theirs.get_worker_ips() == ["localhost"]
            assert os.environ["TPU_PROCESS_BOUNDS"] == host.bounds
            assert os.environ["TPU_CHIPS_PER_PROCESS_BOUNDS"] == "1,1,1"
            assert os.environ["TPU_VISIBLE_CHIPS"] == str(rank)
            if count > 1:
                addresses = os.environ["TPU_PROCESS_ADDRESSES"].split(",")
                assert len(addresses) == count == _size(host.bounds)
                if host.kind != "v7x":  # torch_xla 2.9 can't read its own bounds of four dimensions
                    assert theirs.num_local_processes() == count
                assert addresses[rank] == f"localhost:{os.environ['TPU_PROCESS_PORT']}"
                assert os.environ["CLOUD_TPU_TASK_ID"] == str(rank)
                assert os.environ["PJRT_LOCAL_PROCESS_RANK"] == str(rank)
                assert os.environ["PJRT_LOCAL_PROCESS_COUNT"] == str(count)
            else:
                assert "TPU_PROCESS_ADDRESSES" not in os.environ


@pytest.mark.parametrize(
    "host", [name for name in RUN if HOSTS[name].metadata and HOSTS[name].num_chips > 1], indirect=True
)
def test_with_a_metadata_server_the_environment_equals_torch_xlas(host: Host) -> None:
    count = host.num_chips
    names = [name for name in tpu.TOPOLOGY_VARIABLES if not name.startswith("PJRT")]
    for rank in range(count):
        with mock.patch.dict(os.environ):
            theirs.configure_topology(rank, count)
            expected = {name: os.environ.get(name) for name in names}
        ours = BACKEND.worker_env(Topology(rank, rank, 0, count, count, master_port=1))
        assert {name: ours[name] for name in names} == expected


@pytest.mark.parametrize("host", [name for name in HOSTS if name not in RUN], indirect=True)
def test_unsupported_hosts_are_rejected_with_a_reason(host: Host) -> None:
    assert host.rejected in (BACKEND.launch_problem() or BACKEND.count_problem(host.num_chips) or "")


@pytest.mark.parametrize(
    "host", ["v2-8", "v3-8", "v7x without a server", "v5e-8", "Kaggle v5e-8"], indirect=True
)
def test_one_process_drives_all_chips_of_a_host_with_spmd(host: Host) -> None:
    """This holds even if a process per chip is rejected: v2 and v3 have two cores each. No variable hides a chip
    from it.
    """
    if host.kind == "v7x" and not KNOWS_V7X:
        assert "does not know" in (BACKEND.launch_problem() or "")
        return
    plan = plan_launch(LaunchSpec(function=print, is_spmd=True, backend="xla", start_method="forkserver"))
    assert plan.num_processes == 1
    with mock.patch.dict(os.environ):
        env.apply(BACKEND.worker_env(Topology(master_port=1)) | (BACKEND.spmd_env() or {}))
        assert os.environ["PJRT_DEVICE"] == "TPU"
        assert "TPU_VISIBLE_CHIPS" not in os.environ
        assert os.environ.get("TPU_CHIPS_PER_PROCESS_BOUNDS") == host.variables.get(
            "TPU_CHIPS_PER_PROCESS_BOUNDS"
        )
        assert theirs.version() in (2, 3, 4, 5, 6, 7)
        assert theirs.get_worker_ips() == ["localhost"]


@pytest.mark.parametrize("host", ["v7x", "v6e-8"], indirect=True)
def test_chips_that_are_newer_than_torch_xla_are_rejected(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.8.1")
    problem = BACKEND.launch_problem() or ""
    assert ("torch_xla 2.8.1 does not support v7x" in problem) == (host.kind == "v7x")


def _size(bounds: str) -> int:
    product = 1
    for number in bounds.split(","):
        product *= int(number)
    return product
