"""The launcher's side of the agent of its node."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from nblaunch.config.settings import convert
from nblaunch.errors import LaunchError
from nblaunch.nodes import network
from nblaunch.nodes.agent_client import AgentClient
from nblaunch.spec import LaunchSpec
from tests.benchmarks.bench import free_port


def test_a_failed_restart_closes_no_foreign_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = LaunchSpec(function=print, num_nodes=2, node_rank=1, master_addr="127.0.0.1", master_port=29500)
    client = AgentClient(spec, 1, str(tmp_path / "agent.log"))
    client.end("lost the rendezvous", can_retry=True)

    def reject(*args: Any, **options: Any) -> Any:
        raise LaunchError("no such address any more")

    monkeypatch.setattr(network, "resolve", reject)
    with pytest.raises(LaunchError, match="no such address"):
        client.restart(0)
    opened = [fd for _ in range(4) for fd in os.pipe()]  # with the numbers of the agent's descriptors
    client.close()
    for fd in opened:
        os.close(fd)


def test_a_node_can_be_barred_from_hosting(tmp_path: Path) -> None:
    spec = LaunchSpec(
        function=print, num_nodes=2, rdzv_backend="c10d", rdzv_endpoint=f"127.0.0.1:{free_port()}",
        rdzv_conf=convert("rdzv_conf", "is_host=false"),
    )  # fmt: skip
    client = AgentClient(spec, 1, str(tmp_path / "agent.log"))
    client.close()
    assert client.rendezvous.listen_fd == -1
