"""What a launcher and its node's agent tell each other, and what nodes tell each other through the rendezvous store.

    launcher ── Hosting, Summary, Ended, Leave ──> agent ── NodeNews, as JSON, a key of its own ──> store
             <── Formed, StopWorkers, News, Over ──      <────────── NodeNews of all others ────────

Launcher and agent are two processes of one machine with a pipe each way between them (``wire/channel.py``); the store
lies on one of the nodes. Machines share no secret before they meet, so that any process that reaches the store can
write to it: what is read there is plain data of the classes below (``wire/schema.py``), never a pickle.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from nblaunch import in_words
from nblaunch.events import Contents, Event, ExitStatus, Failed, Finished
from nblaunch.topology import Topology
from nblaunch.wire.board import Sample

JOINING, RUNNING, DONE, FAILED, LEFT = "joining", "running", "done", "failed", "left"
"""States of a node: looking for others; its workers run; they finished; it gave up after a failure; it went away."""

FINISHED = "finished"
"""The reason of a node that went away because all was done, here and elsewhere."""


@dataclass(frozen=True)
class Member:
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
    def place(self) -> str:
        """``node 1 (host b)``."""
        return _place(self.node_rank, self.host)

    def __str__(self) -> str:
        return f"node {self.node_rank} (host {self.host}, {in_words.ranks(self.ranks)})"


# --- launcher to agent -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hosting(Event):
    """The launcher of node 0 listens for the workers of all nodes.

    Args:
        port: TCP port, at the address of that node.
    """

    port: int = 0


@dataclass
class Stopping:
    """A node's part in agreeing on the step at which all ranks leave their loops (``launch/common_stop.py``).

    Args:
        is_wanted: somebody has asked for it.
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
    """How the workers of this node are doing.

    Args:
        samples: of the board, one per worker.
        failed: those that raised.
        exits: those whose process ended.
        finished: those whose function returned.
        stopping: how far agreeing on a common end is.
    """

    samples: tuple[Sample, ...] = ()
    failed: Mapping[int, Failed] = field(default_factory=dict)
    exits: Mapping[int, tuple[ExitStatus, float]] = field(default_factory=dict)
    finished: Mapping[int, Finished] = field(default_factory=dict)
    stopping: Stopping = field(default_factory=Stopping)


@dataclass(frozen=True)
class Ended(Event):
    """All workers of this node have ended."""

    is_success: bool = False
    summary: Summary = field(default_factory=lambda: Summary(-1, 0.0))


@dataclass(frozen=True)
class Leave(Event):
    """This node takes no further part.

    Args:
        reason: what to tell the others, as the rest of a sentence: ``was interrupted``.
    """

    reason: str = ""


# --- agent to launcher -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Formed(Event):
    """The rendezvous is complete.

    Args:
        place: of this node's first worker; ``master_port`` 0 = this node's launcher is to host the workers' store.
        members: all nodes, by node rank.
        restart_count: how often workers were started before, the same number on all nodes.
    """

    place: Topology = field(default_factory=Topology)
    members: tuple[Member, ...] = ()
    restart_count: int = 0


@dataclass(frozen=True)
class StopWorkers(Event):
    """The workers must end, because another rendezvous is to come.

    Args:
        reason: why, as a sentence.
    """

    reason: str = ""


def failed_for_others(failed: Failed) -> Failed:
    """What other nodes get of a failure: the exception as text."""
    return replace(failed, exception=None)


def finished_for_others(finished: Finished) -> Finished:
    """What other nodes get of a rank that finished: that it has."""
    return replace(finished, contents=Contents(), sends=())


@dataclass(frozen=True)
class NodeNews:
    """What one node tells all others, several times a second.

    Args:
        id: which run of which agent.
        beat: counts up as long as the node lives.
        node_rank: the one that it was asked to have, or has.
        host: its host name.
        start: which start of the job's workers the summary is about, as :class:`Formed` counts them.
        state: one of the states above.
        reason: why it left or gave up.
        summary: of its workers.
        heard: id -> the last beat that it has heard of each other node.
        clock_s: ``time.monotonic()`` of that machine, by which the samples' times go.
        terms: what all nodes must have been launched with alike.
    """

    id: str
    beat: int
    node_rank: int
    host: str
    state: str
    start: int = -1
    reason: str = ""
    summary: Summary = field(default_factory=lambda: Summary(-1, 0.0))
    heard: Mapping[str, int] = field(default_factory=dict)
    clock_s: float = 0.0
    terms: str = ""

    def __str__(self) -> str:
        return _place(self.node_rank, self.host)


@dataclass(frozen=True)
class News(Event):
    """The last news of every other node that has ever been at this rendezvous."""

    nodes: tuple[NodeNews, ...] = ()


@dataclass(frozen=True)
class Over(Event):
    """The agent is done.

    Args:
        is_success: all nodes' workers finished, as far as is known.
        error: why not, if it is not the workers' doing: the rendezvous failed.
        can_retry: a new agent may do better: the store was lost.
    """

    is_success: bool = False
    error: str = ""
    can_retry: bool = False


def _place(node_rank: int, host: str) -> str:
    return f"node {node_rank} (host {host})"
