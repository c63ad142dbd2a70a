"""What a job takes of the host's memory, as it is measured and described."""

from __future__ import annotations

import dataclasses

import pytest
from torch import nn

from nblaunch import formatting
from nblaunch.backends.cpu import CpuBackend
from nblaunch.host import memory
from nblaunch.training.host_memory import JobHostMemory, describe_host_memory, gather_host_memory
from nblaunch.training.joining import JoinedProcess
from nblaunch.training.shared_state import get_shared_state

MODEL = nn.Linear(10, 10, bias=False)  # 400 bytes


class _DeviceInHostMemory(CpuBackend):
    def host_bytes_of_device(self, num_bytes: int) -> int | None:
        return 3 * num_bytes


def _process() -> JoinedProcess:
    return dataclasses.replace(get_shared_state().process, backend=_DeviceInHostMemory())


def test_what_stands_for_device_memory_is_taken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "proportional_bytes", lambda *pid: 5000)
    assert gather_host_memory(MODEL, _process()) == JobHostMemory(
        num_workers=1,
        total_bytes=3800,
        has_launcher=False,
        model_bytes=400,
        device_bytes=1200,
        is_built_in_workers=False,
    )


def test_nothing_is_reported_where_the_host_or_the_device_family_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert gather_host_memory(MODEL, get_shared_state().process) is None
    monkeypatch.setattr(memory, "proportional_bytes", lambda *pid: None)
    assert gather_host_memory(MODEL, _process()) is None


def test_a_model_that_was_built_in_every_worker_is_described_with_what_to_do() -> None:
    usage = JobHostMemory(
        num_workers=8,
        total_bytes=4_000_000_000,
        has_launcher=True,
        model_bytes=420_000_000,
        device_bytes=0,
        is_built_in_workers=True,
    )
    line = describe_host_memory(usage)
    assert line.startswith(
        "8 workers and the launching process, host memory 4.00 GB "
    )  # the table has workers alone
    assert "420 MB" in line
    assert "notebook_launcher(function, (model,))" in line
    passed = describe_host_memory(
        dataclasses.replace(usage, is_built_in_workers=False, device_bytes=7_000_000)
    )
    assert "notebook_launcher" not in passed
    assert formatting.size(7_000_000) in passed
    in_script = dataclasses.replace(usage, has_launcher=False)
    assert describe_host_memory(in_script).startswith("8 workers, host memory 4.00 GB ")
