"""Fixtures for the tests of training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nblaunch import backends, context
from tests.training.ranks import rank_server  # noqa: F401  a fixture


@pytest.fixture(autouse=True)
def lone_process() -> Iterator[None]:
    """Every test starts in a process that knows of no job, and computes on the CPU."""
    context.install(context.ProcessContext(context.Topology(), backends.choose("cpu")))
    yield
    context.take()
