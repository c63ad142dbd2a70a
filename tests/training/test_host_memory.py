"""What a job takes of the host's memory once its model is placed, as it is described."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import nn

from nblaunch import context
from nblaunch.backends.cpu import CpuBackend
from nblaunch.host import memory
from nblaunch.topology import Topology
from nblaunch.training.collectives import operations
from nblaunch.training.joining import JoinedProcess
from nblaunch.training.prepare import describe_host_memory
from nblaunch.training.shared_state import get_shared_state

MODEL = nn.Linear(10, 10, bias=False)  # 400 bytes


class _OnTheHost(CpuBackend):
    """A device family whose devices take a multiple of a model's bytes in the host's memory."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def host_bytes_of_device(self, num_bytes: int) -> int | None:
        return self.factor * num_bytes


def _process(factor: int = 3, num_workers: int = 1) -> JoinedProcess:
    topology = Topology(world_size=num_workers, local_world_size=num_workers)
    return dataclasses.replace(get_shared_state().process, backend=_OnTheHost(factor), topology=topology)


@pytest.fixture
def eight_workers(monkeypatch: pytest.MonkeyPatch) -> JoinedProcess:
    """The first of eight, each of which takes 500 MB, as the process that launched them does."""
    monkeypatch.setattr(memory, "proportional_bytes", lambda *pid: 500_000_000)
    monkeypatch.setattr(operations, "gather_object", lambda items: items * 8)
    monkeypatch.setattr(context, "is_worker", lambda: True)
    return _process(factor=0, num_workers=8)


def test_what_stands_for_device_memory_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "proportional_bytes", lambda *pid: 5000)
    line = describe_host_memory(MODEL, _process())
    assert line is not None
    assert line.startswith(
        "1 worker, host memory 3.80 kB (model 400 B held once), besides 1.20 kB that stand for device memory"
    )


def test_nothing_is_reported_where_the_host_or_the_device_family_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert describe_host_memory(MODEL, get_shared_state().process) is None
    monkeypatch.setattr(memory, "proportional_bytes", lambda *pid: None)
    assert describe_host_memory(MODEL, _process()) is None


def test_a_model_that_was_built_in_every_worker_is_described_with_what_to_do(
    eight_workers: JoinedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = describe_host_memory(MODEL, eight_workers)
    assert passed is not None
    assert "model 400 B held once" in passed
    assert "notebook_launcher" not in passed
    monkeypatch.setattr(context.current().slot, "built_bytes", 400)
    line = describe_host_memory(MODEL, eight_workers)
    assert line is not None
    assert line.startswith(
        "8 workers and the launching process, host memory 4.50 GB "
    )  # the table has workers alone
    assert "400 B built in every worker" in line
    assert "notebook_launcher(function, (model,))" in line


def test_a_script_has_no_launching_process(
    eight_workers: JoinedProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "is_worker", lambda: False)
    line: Any = describe_host_memory(MODEL, eight_workers)
    assert line.startswith("8 workers, host memory 4.00 GB ")
