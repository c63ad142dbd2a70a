"""A launcher whose ranks have returned waits for the other node; the test plays the launcher's own agent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from nblaunch.diagnosis.report import AttemptReport
from nblaunch.events import Event
from nblaunch.launcher.requests import JobRequests
from nblaunch.nodes import link, messages
from nblaunch.nodes.link import PeersLink
from nblaunch.nodes.messages import Node, Summary, WorldFormed
from nblaunch.spec import LaunchSpec
from nblaunch.topology import Topology

NODES = (
    Node(id="a", node_rank=0, host="alpha", address="10.0.0.1", first_rank=0, num_workers=1),
    Node(id="b", node_rank=1, host="beta", address="10.0.0.2", first_rank=1, num_workers=1),
)


class Agent:
    """The agent of node 0, which has met node 1 and receives no heartbeat from it."""

    ended = None
    is_closed = False
    is_changing = False
    heartbeats = ()

    def __init__(self, fd: int, patience_s: float) -> None:
        self.silence_s = self.patience_s = patience_s
        self.reasons: list[str] = []
        self.sent: list[Event] = []
        self._fd = fd
        self._worlds = [WorldFormed(-1, 0.0, Topology(world_size=2, num_nodes=2), NODES)]

    def fileno(self) -> int:
        return self._fd

    def receive(self) -> list[Event]:
        return []

    def take_world(self) -> WorldFormed | None:
        return self._worlds.pop() if self._worlds else None

    def send(self, message: Event) -> None:
        self.sent.append(message)

    def leave(self, reason: str) -> None:
        self.reasons.append(reason)


Finished = Callable[..., tuple[PeersLink, Agent]]


@pytest.fixture
def requests() -> Iterator[JobRequests]:
    made = JobRequests()
    yield made
    made.close()


@pytest.fixture
def finished(requests: JobRequests, monkeypatch: pytest.MonkeyPatch) -> Iterator[Finished]:
    """Return a function that creates such a launcher: ``finished(patience_s=...)``."""
    reading, writing = os.pipe()

    def make(patience_s: float = 100.0) -> tuple[PeersLink, Agent]:
        agent = Agent(reading, patience_s)
        monkeypatch.setattr(link, "AgentClient", lambda *args: agent)
        spec = LaunchSpec(function=print, num_nodes=2, master_addr="10.0.0.1")
        node = PeersLink(spec, 1, "", requests, lambda event: None, lambda readings: None)
        assert node.next_world() is not None
        node.conclude(AttemptReport())
        return node, agent

    yield make
    os.close(reading)
    os.close(writing)


def test_an_interrupt_ends_the_wait(finished: Finished, requests: JobRequests) -> None:
    """It also ends the job on the other node, like any interrupt."""
    node, agent = finished()
    requests.interrupt()
    assert node.next_world() is None
    assert agent.reasons == ["was interrupted"]


def test_silent_nodes_are_not_awaited(finished: Finished) -> None:
    node, agent = finished(patience_s=0.0)
    assert node.next_world() is None
    assert agent.reasons == [messages.FINISHED]


@pytest.mark.parametrize(
    "ask", [JobRequests.stop, lambda requests: requests.terminate(20.0)], ids=["stop", "SIGTERM"]
)
def test_a_stop_is_passed_on(
    finished: Finished, requests: JobRequests, ask: Callable[[JobRequests], None]
) -> None:
    """It is passed on once: this node's ranks have returned, the other node's have not."""
    node, agent = finished()
    turns = iter([ask, lambda requests: None, JobRequests.interrupt])
    agent.sent.clear()
    agent.take_world = lambda: next(turns)(requests)  # type: ignore[method-assign]
    assert node.next_world() is None
    (summary,) = agent.sent
    assert isinstance(summary, Summary)
    assert summary.stop.is_wanted


def test_the_link_waits_for_its_agents_start(finished: Finished) -> None:
    """The silent node has come back as a new one."""
    node, agent = finished(patience_s=0.0)
    world = WorldFormed(-1, 0.0, Topology(world_size=2, num_nodes=2), NODES, restart_count=1)
    found = iter([None, world])
    agent.is_changing = True
    agent.take_world = lambda: next(found)  # type: ignore[method-assign]
    assert node.next_world() is world
    assert agent.reasons == []
