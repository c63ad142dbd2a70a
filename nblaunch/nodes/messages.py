"""Messages between a launcher, its node's agent and the other nodes.

    launcher ── AgentConfig, Summary, WorkersEnded, Leave ──>  agent ── Heartbeat, as JSON, one key per node ──> store
             <── WorldFormed, StopWorkers, PeerHeartbeats,           <────────── Heartbeat of all others ──────
                 AgentEnded

The launcher and the agent are two processes on one machine, connected by two pipes (``wire/channel.py``). The agent
receives its ``AgentConfig`` in a memory file when it starts. One node hosts the store. The machines share no secret
before the rendezvous, so any process that reaches the store can write to it. The values in it are therefore parsed as
plain data of the classes below (``wire/schema.py``) and never unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nblaunch import formatting
from nblaunch.events import (
    EpochEnded,
    Event,
    ExitStatus,
    Failed,
    HostMemory,
    Returned,
)
from nblaunch.topology import Topology
from nblaunch.wire.board import NO_LOSSES, SlotReading

JOINING, RUNNING, DONE, FAILED, LEFT = "joining", "running", "done", "failed", "left"
"""States of a node: in the rendezvous; workers running; finished; failed; left the job."""

FINISHED = "finished"
"""Reason that a node gives when it leaves because all nodes have finished."""

_NUM_CURVES = 8
"""Number of ranks whose losses are sent to the other nodes; dashboards draw at most this many."""

LINGER_S = 4.0
"""Maximum number of seconds that an agent waits for the others to receive its last heartbeat."""


@dataclass(frozen=True)
class Node:
    """A node of a world.

    Args:
        id: id of the agent process; a node that comes back has a new id.
        address: address at which the other nodes reach it.
        first_rank: rank of its first worker.
    """

    id: str
    node_rank: int
    host: str
    address: str
    first_rank: int
    num_workers: int

    @property
    def ranks(self) -> range:
        """The ranks of its workers."""
        return range(self.first_rank, self.first_rank + self.num_workers)

    @property
    def label(self) -> str:
        """``node 1 (host b)``."""
        return _label(self.node_rank, self.host)

    def __str__(self) -> str:
        return f"node {self.node_rank} (host {self.host}, {formatting.ranks(self.ranks)})"


# --- launcher to agent -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RendezvousConfig:
    """Configuration of the rendezvous.

    Args:
        backend: ``"static"`` or ``"c10d"``.
        listen_fd: listening socket of the store on the node that hosts it; -1 on the others.
        run_id: name of the job.
        node_rank: requested rank of this node.
        conf: further settings, under torch's names.
    """

    backend: str
    host: str
    port: int
    listen_fd: int
    run_id: str
    node_rank: int
    min_nodes: int
    max_nodes: int
    timeout_s: float
    conf: dict[str, Any] = field(default_factory=dict)

    @property
    def shared_settings(self) -> str:
        """The settings that must be equal on all nodes: otherwise the nodes would wait for each other."""
        is_fixed = self.min_nodes == self.max_nodes
        num_nodes = str(self.max_nodes) if is_fixed else f"{self.min_nodes}:{self.max_nodes}"
        return f"rdzv_backend={self.backend} and num_nodes={num_nodes}"

    @property
    def endpoint(self) -> str:
        """``host:port``, with an IPv6 address in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True)
class AgentConfig:
    """Configuration of an agent.

    Args:
        address: address at which the other nodes reach this node.
        log_path: file for its output.
    """

    rendezvous: RendezvousConfig
    num_workers: int
    max_restarts: int
    address: str
    host_name: str
    log_path: str
    reading_fd: int = -1
    writing_fd: int = -1


@dataclass
class StopState:
    """State of a node in a :class:`~nblaunch.nodes.peer_states.NodesStopAgreement`.

    Args:
        is_wanted: a stop was requested on any node.
        proposal: number of the check at which a leader proposes that all ranks stop; 0 = none yet.
        decision: the proposal if the leader has accepted it; its negative if the leader has withdrawn it.
        replies: rank -> checks so far, and the reply to the proposal.
    """

    is_wanted: bool = False
    proposal: int = 0
    decision: int = 0
    replies: Mapping[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary(Event):
    """State of this node's workers.

    Args:
        exits: rank -> how and when its process ended.
        host_memory: last sample of each worker.
    """

    readings: tuple[SlotReading, ...] = ()
    failed: Mapping[int, Failed] = field(default_factory=dict)
    exits: Mapping[int, tuple[ExitStatus, float]] = field(default_factory=dict)
    returned: Mapping[int, Returned] = field(default_factory=dict)
    epochs: tuple[EpochEnded, ...] = ()
    host_memory: tuple[HostMemory, ...] = ()
    stop: StopState = field(default_factory=StopState)


def for_peers(reading: SlotReading) -> SlotReading:
    """Return the part of a reading that goes to the other nodes: only a few ranks' losses are drawn there."""
    return reading if reading.rank < _NUM_CURVES else replace(reading, losses=NO_LOSSES)


@dataclass(frozen=True)
class WorkersEnded(Event):
    """All workers of this node have ended."""

    is_success: bool = False
    summary: Summary = field(default_factory=lambda: Summary(-1, 0.0))


@dataclass(frozen=True)
class Leave(Event):
    """This node leaves the job.

    Args:
        reason: reason that the other nodes report, as the end of a sentence: ``was interrupted``.
    """

    reason: str = ""


# --- agent to launcher -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorldFormed(Event):
    """The rendezvous is complete.

    Args:
        topology: topology of this node's first worker, with the port of the store in the agent of node 0.
        nodes: all nodes, by node rank.
        restart_count: number of earlier starts of the workers; the same on all nodes.
    """

    topology: Topology = field(default_factory=Topology)
    nodes: tuple[Node, ...] = ()
    restart_count: int = 0


@dataclass(frozen=True)
class StopWorkers(Event):
    """The workers must stop because another rendezvous follows."""

    reason: str = ""


@dataclass(frozen=True)
class Heartbeat:
    """State that a node publishes for all others, several times a second.

    Args:
        id: id of the agent process.
        count: number of heartbeats so far; rises as long as the node is alive.
        node_rank: requested node rank; after the rendezvous, the node rank in the world.
        state: one of the states above.
        restart_count: the start of the workers that the summary describes, as in :class:`WorldFormed`.
        received: id -> count of the last heartbeat received from each other node that has ended.
        version: rises with each change that other nodes must know about immediately.
    """

    id: str
    count: int
    node_rank: int
    host: str
    state: str
    restart_count: int = -1
    reason: str = ""
    summary: Summary = field(default_factory=lambda: Summary(-1, 0.0))
    received: Mapping[str, int] = field(default_factory=dict)
    settings: str = ""
    version: int = 0

    def __str__(self) -> str:
        return _label(self.node_rank, self.host)


@dataclass(frozen=True)
class PeerHeartbeats(Event):
    """The last heartbeat of every other node that has ever published one on this store."""

    heartbeats: tuple[Heartbeat, ...] = ()


@dataclass(frozen=True)
class AgentEnded(Event):
    """The agent has ended.

    Args:
        is_success: the workers finished.
        error: why the rendezvous failed; empty if it did not.
        can_retry: a new agent may succeed, because only the connection to the store was lost.
    """

    is_success: bool = False
    error: str = ""
    can_retry: bool = False


def _label(node_rank: int, host: str) -> str:
    return f"node {node_rank} (host {host})"
