"""Messages between a launcher, its node's agent and the other nodes.

    launcher ── StoreHosted, Summary, WorkersEnded, Leave ──>  agent ── Heartbeat, as JSON, one key per node ──> store
             <── WorldFormed, StopWorkers, PeerHeartbeats,           <────────── Heartbeat of all others ──────
                 AgentEnded

Launcher and agent are two processes of one machine with a pipe each way between them (``wire/channel.py``); the store
is hosted by one of the nodes. Machines share no secret before the rendezvous, so any process that reaches the store can
write to it: what is read there is plain data of the classes below (``wire/schema.py``), never a pickle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from nblaunch import formatting
from nblaunch.events import Contents, Event, ExitStatus, Failed, Finished
from nblaunch.topology import Topology
from nblaunch.wire.board import Sample

JOINING, RUNNING, DONE, FAILED, LEFT = "joining", "running", "done", "failed", "left"
"""States of a node: in the rendezvous; its workers run; they finished; it gave up after a failure; it went away."""

FINISHED = "finished"
"""The reason of a node that went away because all was done, here and on the other nodes."""


@dataclass(frozen=True)
class Node:
    """A node of a formed world.

    Args:
        id: names one run of one agent; a node that comes back has another.
        node_rank: among the nodes of this world.
        host: its host name.
        address: at which the others reach it.
        first_rank: the rank of its first worker.
        num_workers: how many it has.
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
class StoreHosted(Event):
    """The launcher of node 0 listens for the workers of all nodes.

    Args:
        port: TCP port, at the address of that node.
    """

    port: int = 0


@dataclass
class StopState:
    """A node's part in the agreement on the step at which all ranks leave their loops (:class:`NodesStopAgreement`).

    Args:
        is_wanted: a stop was requested on this node or on another.
        proposal: of node 0: the number of the check; 0 = none yet.
        decision: of node 0: the proposal once it holds, negated once it is withdrawn.
        answers: rank -> checks so far, and the reply to the proposal.
    """

    is_wanted: bool = False
    proposal: int = 0
    decision: int = 0
    answers: Mapping[int, tuple[int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary(Event):
    """State of the workers of this node.

    Args:
        samples: of the board, one per worker.
        failed: those that raised.
        exits: those whose process ended.
        finished: those whose function returned.
        stop: how far the agreement on a common last step is.
    """

    samples: tuple[Sample, ...] = ()
    failed: Mapping[int, Failed] = field(default_factory=dict)
    exits: Mapping[int, tuple[ExitStatus, float]] = field(default_factory=dict)
    finished: Mapping[int, Finished] = field(default_factory=dict)
    stop: StopState = field(default_factory=StopState)


@dataclass(frozen=True)
class WorkersEnded(Event):
    """All workers of this node have ended."""

    is_success: bool = False
    summary: Summary = field(default_factory=lambda: Summary(-1, 0.0))


@dataclass(frozen=True)
class Leave(Event):
    """This node takes no further part.

    Args:
        reason: for the other nodes, as the rest of a sentence: ``was interrupted``.
    """

    reason: str = ""


# --- agent to launcher -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WorldFormed(Event):
    """The rendezvous is complete.

    Args:
        topology: of this node's first worker; ``master_port`` 0 = this node's launcher is to host the workers' store.
        nodes: all nodes, by node rank.
        restart_count: how often workers were started before, the same number on all nodes.
    """

    topology: Topology = field(default_factory=Topology)
    nodes: tuple[Node, ...] = ()
    restart_count: int = 0


@dataclass(frozen=True)
class StopWorkers(Event):
    """The workers must end, because another rendezvous follows.

    Args:
        reason: why, as a sentence.
    """

    reason: str = ""


@dataclass(frozen=True)
class Heartbeat:
    """What one node publishes for all others, several times a second.

    Args:
        id: which run of which agent.
        count: of the heartbeats of this node so far; goes up as long as the node lives.
        node_rank: the one that it was asked to have, or has.
        host: its host name.
        state: one of the states above.
        restart_count: which start of the job's workers the summary is about, as in :class:`WorldFormed`.
        reason: why it left or gave up.
        summary: of its workers.
        received: id -> count of the last heartbeat that it has received of each other node.
        clock_s: ``time.monotonic()`` of that machine, by which the samples' times go.
        settings: those that all nodes must have been launched with alike.
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
    clock_s: float = 0.0
    settings: str = ""

    def __str__(self) -> str:
        return _label(self.node_rank, self.host)


@dataclass(frozen=True)
class PeerHeartbeats(Event):
    """The last heartbeat of every other node that has ever been at this rendezvous."""

    heartbeats: tuple[Heartbeat, ...] = ()


@dataclass(frozen=True)
class AgentEnded(Event):
    """The agent is done.

    Args:
        is_success: all nodes' workers finished, as far as is known.
        error: why not, if the workers are not the reason: the rendezvous failed.
        can_retry: a new agent may do better: the store was lost.
    """

    is_success: bool = False
    error: str = ""
    can_retry: bool = False


# --- what may leave this machine ---------------------------------------------------------------------------------


def failed_for_peers(failed: Failed) -> Failed:
    """Return the failure as other nodes get it: the exception as text."""
    return replace(failed, exception=None)


def finished_for_peers(finished: Finished) -> Finished:
    """Return the event as other nodes get it: that the rank has finished, and nothing of its result."""
    return replace(finished, contents=Contents(), sends=())


def _label(node_rank: int, host: str) -> str:
    return f"node {node_rank} (host {host})"
