"""Fixtures for the tests of training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nblaunch import backends, context
from tests.training.ranks import rank_server  # noqa: F401  a fixture


@pytest.fixture(autouse=True)
def lone_process() -> Iterator[None]:
    """Start every test in a process without a job that computes on the CPU."""
    context.install(context.ProcessContext(context.Topology(), backends.choose("cpu")))
    yield
    context.take()
