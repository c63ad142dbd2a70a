"""Fixtures for the tests of training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nblaunch import backends, context
from tests.training import ranks


@pytest.fixture(scope="session", autouse=True)
def rank_server() -> Iterator[None]:
    """The process that ranks are forked from lives as long as the tests of this folder."""
    ranks.start_server()
    yield
    ranks.stop_server()


@pytest.fixture(autouse=True)
def lone_process() -> Iterator[None]:
    """Every test starts in a process that knows of no job, and computes on the CPU."""
    context.reset()
    context.install(context.WorkerContext(context.Topology(), backends.choose("cpu")))
    yield
    context.reset()
