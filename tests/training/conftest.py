"""Fixtures for the tests of training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nblaunch import backends, context
from nblaunch.events import Event, Observation
from tests import alarms
from tests.training.ranks import rank_server  # noqa: F401  a fixture


@pytest.fixture(autouse=True)
def lone_process(no_false_alarms: None) -> Iterator[None]:
    """Start every test in a process without a job that computes on the CPU."""
    observed: list[Event] = []
    lone = context.ProcessContext(context.Topology(), backends.choose("cpu"), emit=observed.append)
    context.install(lone)
    yield
    context.take()
    alarms.judge([event for event in observed if isinstance(event, Observation)], 1)


@pytest.fixture
def unwatched(lone_process: None) -> None:
    """Leave the process without a launcher that receives observations, so that its checks warn themselves."""
    context.install(context.ProcessContext(context.Topology(), backends.choose("cpu"), is_watched=False))
