"""Messages between the coordinator of a job and the node program on each machine.

    coordinator ── Boot, CallPart ──────────────────────> node     what to run, and the key of the job
                <── Hello, Ready or Refused ────────────
                ── StartRanks ──────────────────────────>          one attempt
                <── Happened, LogPart, Heartbeat, ... ──           while it runs
                ── Request, Proposal, AskStacks, ... ───>
                <── OutboxPart, AttemptOver ────────────           at its end

All but :class:`Hello` and :class:`Boot` travel under a seal (``channel.py``). A heartbeat is the same as in ``nodes/``.
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
"""Size of a part of something large."""


@dataclass(frozen=True)
class Hello:
    """The first words of a node program, before it has a key: what decides whether it can read the call.

    Args:
        host: name of the machine.
        python: version, as ``3.11``.
        nblaunch: version.
    """

    host: str
    python: str
    nblaunch: str

    @classmethod
    def of_this_process(cls) -> Hello:
        """Return the clocks of this process."""
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        # Nothing here may import the package above it.
        return cls(socket.gethostname(), python, sys.modules["nblaunch"].__version__)


@dataclass(frozen=True)
class ModuleSource:
    """A module of the user's, to be imported from its text.

    Args:
        name: dotted.
        filename: of the file here, which tracebacks name.
        text: text of the file.
        is_package: it holds other modules.
    """

    name: str
    filename: str
    text: str
    is_package: bool


@dataclass(frozen=True)
class Boot:
    """What a node program is started with. It is the first message to it, and has the key.

    Args:
        key: key of the job.
        spec: of the launch on this node alone, without the call.
        registered_backend: the backend, pickled, where it is not part of nblaunch.
        call: what surrounds the call, which follows in parts.
        call_bytes: size of the call.
        modules: of the user's, that travel with it.
        required: top-level modules that the call needs besides.
        environment: variables to set.
        is_same_machine: paths of the launching process mean the same here.
        address: address of the node, as the others reach it; empty if it finds that out.
        number: number of the node among those that were started.
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
    number: int


# --- coordinator to node -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CallPart:
    """Bytes of the call, in order."""

    data: bytes


@dataclass(frozen=True)
class AskClock:
    """Asks what time it is there."""

    sent_s: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class StartRanks:
    """Starts the ranks of a node.

    Args:
        topology: topology of the first of them; ``master_port`` 0: the store is hosted on this node.
        number: number of the attempt.
        key: for objects between ranks.
        first_collected: rank that sends what all have alike.
    """

    topology: Topology
    number: int
    key: bytes = field(repr=False)
    first_collected: int = 0


@dataclass(frozen=True)
class Request:
    """A request to the job: ``"interrupt"``, ``"cancel"`` or ``"stop"``, as of ``JobRequests``."""

    kind: str


@dataclass(frozen=True)
class Terminate:
    """SIGTERM has come to the job, whose ranks have ``grace_s`` seconds to return by themselves."""

    grace_s: float


@dataclass(frozen=True)
class EndRanks:
    """The ranks of this node must end, because of what happened elsewhere."""


@dataclass(frozen=True)
class Proposal:
    """The coordinator's side of an agreement on the step at which all ranks end (``agreements.py``).

    Args:
        subject: what ranks count: checks of ``accelerator.should_stop``, or steps of optimizers.
        number: number of the check that is proposed; 0 = none yet.
        decision: the same once it holds for all ranks, negated once it is withdrawn.
        is_last: no other proposal follows.
    """

    subject: Subject
    number: int = 0
    decision: int = 0
    is_last: bool = False


@dataclass(frozen=True)
class AskStacks:
    """Asks where these ranks are, and for the last collectives of all ranks of the node."""

    number: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class AskLogs:
    """Asks for all that ranks have printed and sent by now."""

    number: int


# --- node to coordinator -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ready:
    """The node has loaded the call and made its plan.

    Args:
        id: id of the node program.
        address: as the other nodes reach it.
        torch: version.
        num_processes: ranks that it takes.
        backend: name of the device family.
        start_method: how ranks start there.
        reason: for it.
        fallback: why ranks are not forked there; empty otherwise.
        num_threads: CPU threads of each rank.
        warnings: of the plan.
        log_dir: folder of its logs.
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
    log_dir: str


@dataclass(frozen=True)
class Refused:
    """The node can't run the call.

    Args:
        kind: name of the exception: ``LaunchError``, ``ValueError``, ``TypeError`` or ``RuntimeError``.
        text: of it.
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
    """The store of the ranks listens at this port of the node."""

    port: int


@dataclass(frozen=True)
class Replies:
    """Replies of the ranks of this node to a :class:`Proposal`: rank -> checks so far, and the reply."""

    subject: Subject
    by_rank: Mapping[int, tuple[int, int]]


@dataclass(frozen=True)
class Happened:
    """Events of the ranks of this node."""

    events: tuple[Event, ...]


@dataclass(frozen=True)
class LogPart:
    """What a rank has printed since the last part, or written of its stacks.

    Args:
        is_stacks: the latter.
        left_out: bytes before it that stay in the node's own file.
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
    """Digests of some of the last collectives of ranks of this node (``collectives.py``).

    Args:
        digests: group and number -> digest; equal on all nodes.
        differ: ranks of this node differ already.
    """

    digests: Mapping[tuple[int, int], float]
    differ: bool = False


@dataclass(frozen=True)
class LogsSent:
    """Answers :class:`AskLogs`, behind all that it asks for."""

    number: int


@dataclass(frozen=True)
class DevicesUsed:
    """Use of the devices of ranks, 0 to 1."""

    shares: Mapping[int, float]


@dataclass(frozen=True)
class OutboxPart:
    """A part of what a rank has left for the launcher (``wire/outbox.py``)."""

    rank: int
    at: int
    data: bytes


@dataclass(frozen=True)
class AttemptOver:
    """All ranks of this node have ended, and all that they have left was sent.

    Args:
        signalled: rank -> time of the first signal to it.
        unkillable: rank -> a sentence about its process.
        evidence: what this machine says of its failures.
        last_readings: of the ranks of this node.
        hang: which this node has found for certain, as a deadlock of threads.
        calls: rank -> the last collectives that it has recorded.
    """

    signalled: Mapping[int, float]
    unkillable: Mapping[int, str]
    evidence: Mapping[int, Evidence]
    last_readings: tuple[SlotReading, ...]
    hang: Hang | None = None
    calls: Mapping[int, RankCalls] = field(default_factory=dict)
