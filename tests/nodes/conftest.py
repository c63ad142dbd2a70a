"""Two simulated machines for a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.nodes.machines import Pair, machines
from tests.nodes.warm import Warm


@pytest.fixture(scope="session")
def warm() -> Iterator[list[Warm]]:
    """Start a process for each machine that has imported everything."""
    both = [Warm(), Warm()]
    yield both
    for one in both:
        one.close()


@pytest.fixture
def pair(warm: list[Warm], nothing_left_behind: None, tmp_path: Path) -> Iterator[Pair]:
    """Create two machines; their processes must have ended by the end of the test."""
    with machines(tmp_path, warm) as pair:
        yield pair


@pytest.fixture
def static(pair: Pair) -> dict[str, Any]:
    """Settings of a launch on both machines with fixed ranks. A silent machine is named after two seconds, and
    given up after six.
    """
    conf = {"keep_alive_interval": 2, "keep_alive_max_attempt": 3}
    return {"num_nodes": 2, "master_addr": pair[0].address, "rdzv_timeout_s": 30, "rdzv_conf": conf}


@pytest.fixture
def c10d(pair: Pair) -> dict[str, Any]:
    """Settings of a launch on both machines without fixed ranks."""
    conf = {"keep_alive_interval": 2, "keep_alive_max_attempt": 2, "last_call_timeout": 1}
    endpoint = f"{pair[0].address}:29400"
    return {
        "num_nodes": 2, "rdzv_backend": "c10d", "rdzv_endpoint": endpoint, "rdzv_timeout_s": 30, "rdzv_conf": conf,
    }  # fmt: skip
