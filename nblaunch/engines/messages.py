"""Messages between the coordinator of a job and the node program on each machine.

    coordinator ── Boot, CallPart ──────────────────────> node     the call, and the key of the job
                <── Hello, Ready or Rejected ────────────
                ── StartRanks ──────────────────────────>          one attempt
                <── Happened, LogPart, Heartbeat, ... ──           while it runs
                ── Request, Proposal, AskStacks, ... ───>
                <── OutboxPart, AttemptOver ────────────           at its end

All messages except :class:`Hello` and :class:`Boot` are sealed (``channel.py``). Heartbeats are the same as in
``nodes/``.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from nblaunch.diagnosis.hang import Check
from nblaunch.diagnosis.report import Evidence, Hang
from nblaunch.events import Event
from nblaunch.spec import LaunchSpec
from nblaunch.start_methods.saved_call import SavedCall
from nblaunch.topology import Topology
from nblaunch.wire.board import SlotReading
from nblaunch.wire.collective_calls import RankCalls

Subject = Literal["check", "step"]

PART_BYTES = 1 << 20
"""Size of a part of a large object."""


@dataclass(frozen=True)
class Hello:
    """A node program's first message, before it has a key: the versions that decide if it can read the call.

    Args:
        host: name of the machine.
        python: version of Python, such as ``3.11``.
        nblaunch: version of nblaunch.
    """

    host: str
    python: str
    nblaunch: str

    @classmethod
    def of_this_process(cls) -> Hello:
        """Return this process's host name and its versions of Python and nblaunch."""
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        # This package must not import the top-level package.
        return cls(socket.gethostname(), python, sys.modules["nblaunch"].__version__)


@dataclass(frozen=True)
class ModuleSource:
    """A user's module, sent as source text.

    Args:
        name: dotted name.
        filename: path on the launching machine, for tracebacks.
        text: text of the file.
        is_package: whether the module is a package.
    """

    name: str
    filename: str
    text: str
    is_package: bool


@dataclass(frozen=True)
class Boot:
    """The first message to a node program, which contains the key.

    Args:
        key: key of the job.
        spec: settings of the launch on this node, without the call.
        registered_backend: the pickled backend, if it is not part of nblaunch.
        call: environment of the call. The call itself follows in parts.
        call_bytes: size of the call.
        modules: the user's modules that are sent.
        required: other top-level modules that the call needs.
        environment: variables to set.
        is_same_machine: whether paths of the launching process are valid here.
        address: address at which other nodes reach this node; empty if the program determines it.
        is_kept: the node program is kept for further jobs, each of which begins with another :class:`Boot`.
    """

    key: bytes = field(repr=False)
    spec: LaunchSpec
    registered_backend: bytes
    call: SavedCall
    call_bytes: int
    modules: Sequence[ModuleSource]
    required: Sequence[str]
    environment: Mapping[str, str]
    is_same_machine: bool
    address: str
    is_kept: bool = False


# --- coordinator to node -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CallPart:
    """Bytes of the call, in order."""

    data: bytes


@dataclass(frozen=True)
class AskClock:
    """Asks for the node's time."""

    sent_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class StartRanks:
    """Starts the ranks of a node.

    Args:
        topology: topology of the first rank; with ``master_port`` 0, this node hosts the store.
        number: number of the attempt.
        key: key for signing objects that ranks send to each other.
    """

    topology: Topology
    number: int
    key: bytes = field(repr=False)


@dataclass(frozen=True)
class Request:
    """A request to the job: ``"interrupt"`` or ``"cancel"``, as in ``JobRequests``."""

    kind: str


@dataclass(frozen=True)
class Terminate:
    """The job received SIGTERM; its ranks have ``grace_s`` seconds to return by themselves."""

    grace_s: float


@dataclass(frozen=True)
class EndRanks:
    """The ranks of this node must end because of an event elsewhere."""


@dataclass(frozen=True)
class Leave:
    """The job has ended. If :attr:`Boot.is_kept` is set, the node program sends :class:`Hello` again."""


@dataclass(frozen=True)
class Proposal:
    """The coordinator's side of an agreement on the step at which all ranks end (``agreements.py``).

    Args:
        subject: what ranks count: checks of ``accelerator.should_stop``, or steps of optimizers.
        number: number of the proposed check; 0 = none yet.
        decision: the same number once it is agreed, negated once it is withdrawn.
        is_last: whether this is the last proposal.
    """

    subject: Subject
    number: int = 0
    decision: int = 0
    is_last: bool = False


@dataclass(frozen=True)
class AskStacks:
    """Asks for the stacks of these ranks, and for the last collectives of every rank on the node."""

    number: int
    ranks: tuple[int, ...]


# --- node to coordinator -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """The node has loaded the call and planned its launch.

    Args:
        id: id of the node program.
        address: address at which other nodes reach it.
        torch: version of torch.
        num_processes: number of ranks that the node runs.
        backend: name of the device family.
        start_method: how ranks start there.
        reason: reason for the start method.
        fallback: why ranks are not forked there; empty if they are.
        num_threads: number of CPU threads per rank.
        warnings: warnings of the plan.
    """

    id: str
    address: str
    torch: str
    num_processes: int
    backend: str
    start_method: str
    reason: str
    fallback: str
    num_threads: int
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Rejected:
    """The node can't run the call.

    Args:
        kind: name of the exception: ``LaunchError``, ``ValueError``, ``TypeError`` or ``RuntimeError``.
        text: message of the exception.
    """

    kind: str
    text: str


@dataclass(frozen=True)
class ClockIs:
    """Answers :class:`AskClock`: the node's ``time()`` and ``monotonic()``."""

    sent_s: float
    time_s: float
    monotonic_s: float


@dataclass(frozen=True)
class StoreOpened:
    """The ranks' store is listening on this port of the node."""

    port: int


@dataclass(frozen=True)
class Replies:
    """Replies from this node's ranks to a :class:`Proposal`: rank -> number of checks so far, and the reply."""

    subject: Subject
    by_rank: Mapping[int, tuple[int, int]]


@dataclass(frozen=True)
class Happened:
    """Events from this node's ranks."""

    events: tuple[Event, ...]


@dataclass(frozen=True)
class LogPart:
    """A rank's output since the last part, or a part of its stacks file.

    Args:
        is_stacks: whether the part belongs to the stacks file.
        left_out: number of bytes omitted just before the part; they are only in the node's file.
    """

    rank: int
    data: bytes
    is_stacks: bool = False
    left_out: int = 0


@dataclass(frozen=True)
class Stacks:
    """Answers :class:`AskStacks`.

    Args:
        calls: rank -> the last collectives that it has recorded.
    """

    number: int
    checks: Mapping[int, Check]
    calls: Mapping[int, RankCalls] = field(default_factory=dict)


@dataclass(frozen=True)
class CallMarks:
    """Digests of some recent collectives of this node's ranks (``collectives.py``).

    Args:
        digests: group and number -> digest; digests with the same key must be equal on all nodes.
        differ: whether the collectives of this node's ranks already differ.
    """

    digests: Mapping[tuple[int, int], float]
    differ: bool = False


@dataclass(frozen=True)
class DevicesUsed:
    """Utilisation of the ranks' devices, 0 to 1."""

    shares: Mapping[int, float]


@dataclass(frozen=True)
class OutboxPart:
    """A part of a rank's outbox (``wire/outbox.py``)."""

    rank: int
    at: int
    data: bytes


@dataclass(frozen=True)
class AttemptOver:
    """All ranks on this node have ended, and their outboxes have been sent.

    Args:
        signalled: rank -> time of the first signal to it.
        unkillable: rank -> a sentence about its process.
        evidence: evidence from this machine about its ranks' failures.
        last_readings: last readings of the ranks on this node.
        hang: a hang that this node detected with certainty, such as a deadlock of threads.
        calls: rank -> the last collectives that it has recorded.
    """

    signalled: Mapping[int, float]
    unkillable: Mapping[int, str]
    evidence: Mapping[int, Evidence]
    last_readings: tuple[SlotReading, ...]
    hang: Hang | None = None
    calls: Mapping[int, RankCalls] = field(default_factory=dict)
