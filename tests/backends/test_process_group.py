"""The process group of a worker that is about to end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from nblaunch.backends import process_group


@pytest.fixture(autouse=True, params=["gloo", None])
def _alone(request: pytest.FixtureRequest) -> Iterator[None]:
    dist.init_process_group(request.param, store=HashStore(), rank=0, world_size=1)
    yield
    process_group.leave()


def test_a_group_on_the_cpu_ends_with_its_process() -> None:
    process_group.leave_at_exit()
    assert process_group.is_joined()


def test_a_group_on_a_device_is_destroyed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    process_group.leave_at_exit()
    assert not process_group.is_joined()
