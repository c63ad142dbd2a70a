"""The facts about one attempt of a job, or one command of a session: plain data, collected from events."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from nblaunch.diagnosis.disagreements import Explanation
from nblaunch.diagnosis.memory import MemoryRecord
from nblaunch.events import (
    EpochEnded,
    Event,
    Exited,
    ExitStatus,
    Failed,
    HostMemory,
    Interrupted,
    Returned,
    StateSent,
    ValueLocation,
)
from nblaunch.wire.argument_paths import ArgPath
from nblaunch.wire.board import SlotReading
from nblaunch.wire.collective_calls import RankCalls

_NUM_EPOCHS_KEPT = 64


@dataclass
class RemoteFailures:
    """Failures of workers on other nodes, except those that another failure caused.

    Args:
        labels: rank -> label of its node, for all ranks on other nodes.
        failed: ranks whose function raised an exception.
        exits: ranks whose process ended without an exception, and when.
        returned: ranks whose function returned.
        lost: rank -> why its node was lost, as a sentence; one rank for each lost node.
        wants_restart: the set of nodes is changing, so all workers must restart although none has failed.
        advice: what to do about a lost node; if empty, the advice is to look at the output of its launcher.
    """

    labels: Mapping[int, str] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    exits: dict[int, tuple[ExitStatus, float]] = field(default_factory=dict)
    returned: dict[int, Returned] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    wants_restart: bool = False
    advice: str = ""

    @property
    def has_cause(self) -> bool:
        """Whether a failure on another node explains why workers on this node stopped."""
        return bool(self.failed or self.exits or self.lost)


@dataclass(frozen=True)
class Hang:
    """A hang that made the launcher stop the job.

    Args:
        ranks: ranks that the others wait for, if known.
        headline: what happened, as a sentence that begins with these ranks.
        lines: positions of all ranks.
        advice: what to look for, if the lines do not say it.
        is_explained: the recorded collectives of the ranks explain the hang.
    """

    ranks: tuple[int, ...]
    headline: str
    lines: tuple[str, ...]
    advice: str
    is_explained: bool = False


@dataclass(frozen=True)
class Evidence:
    """Evidence from a rank's machine about why the rank failed, as lines of text.

    Args:
        memory: evidence that memory ran out.
        shm: evidence that /dev/shm is full.
    """

    memory: tuple[str, ...] = ()
    shm: tuple[str, ...] = ()


@dataclass
class AttemptReport:
    """The facts about one attempt, by rank. Times are wall clock seconds.

    Args:
        returned: ranks whose function returned.
        sent_states: rank -> argument path of a module or optimizer -> its state, which the rank has sent.
        interruptions: ranks whose function ended because of the user's interrupt.
        failed: ranks whose function raised, in order of arrival.
        exits: exit status of each process on this node, and when its exit was seen.
        signalled: rank -> time of the launcher's first signal to it.
        interrupted: the user interrupted the job before any rank failed and before all ranks had delivered their
            values, and not all ranks returned afterwards.
        cancelled: the job was cancelled.
        stopped_early: all ranks left their loops at the same step, on request.
        last_readings: last readings of the board.
        memory: the host's memory during the attempt.
        epochs: the most recent ends of epochs on any rank, oldest first.
        host_memory: rank -> last sample with its peak, for ranks on this node.
        kept: ranks that keep running for the debugger.
        unkillable: rank -> a sentence about its process, which did not end after SIGKILL.
        hang: the hang that made the launcher stop the job; None otherwise.
        remote: failures of ranks on other nodes.
        places: rank -> label of its node, if an engine has started it; empty on one machine.
        evidence: rank -> evidence from its own node about its death or failure, if an engine has started the node.
        disagreement: calls that must agree but do not; None if no difference is known.
        calls: rank -> its last collectives, for ranks on this node.
        is_script: whether the function is a script, which chooses its own exit code.
    """

    returned: dict[int, Returned] = field(default_factory=dict)
    sent_states: dict[int, dict[ArgPath, StateSent]] = field(default_factory=dict)
    interruptions: dict[int, Interrupted] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    exits: dict[int, tuple[ExitStatus, float]] = field(default_factory=dict)
    signalled: dict[int, float] = field(default_factory=dict)
    interrupted: bool = False
    cancelled: bool = False
    stopped_early: bool = False
    last_readings: list[SlotReading] = field(default_factory=list)
    memory: MemoryRecord | None = None
    host_memory: dict[int, HostMemory] = field(default_factory=dict)
    epochs: deque[EpochEnded] = field(default_factory=lambda: deque(maxlen=_NUM_EPOCHS_KEPT))
    kept: list[int] = field(default_factory=list)
    unkillable: dict[int, str] = field(default_factory=dict)
    hang: Hang | None = None
    remote: RemoteFailures = field(default_factory=RemoteFailures)
    places: Mapping[int, str] = field(default_factory=dict)
    evidence: dict[int, Evidence] = field(default_factory=dict)
    disagreement: Explanation | None = None
    calls: dict[int, RankCalls] = field(default_factory=dict)
    is_script: bool = False

    def add(self, event: Event) -> None:
        """Record a rank's event. Only the first value, failure and exit of each rank count."""
        rank = event.rank
        if isinstance(event, Returned):
            self.returned.setdefault(rank, event)
        elif isinstance(event, Interrupted):
            self.interruptions[rank] = event
        elif isinstance(event, StateSent):
            self.sent_states.setdefault(rank, {})[event.path] = event
        elif isinstance(event, EpochEnded):
            self.epochs.append(event)
        elif isinstance(event, Failed) and rank not in self.returned:
            self.failed.setdefault(rank, event)
        elif isinstance(event, Exited):
            self.exits.setdefault(rank, (event.status, event.time_s))

    @property
    def is_success(self) -> bool:
        """Whether the function returned on every rank and the job was not stopped."""
        is_stopped = self.interrupted or self.cancelled or self.hang or self.kept or self.disagreement
        return not is_stopped and len(self.returned) == len(self.exits)

    def is_decided(self, ranks: Collection[int]) -> bool:
        """Return whether the outcome is already decided although processes are still running.

        That is, one of the ``ranks`` has failed, or all have sent their results. An interrupt then only ends the
        processes sooner, and no other attempt follows.
        """
        has_failed = self.failed or self.exits.keys() - self.returned.keys()
        return bool(has_failed or self.delivered.issuperset(ranks))

    @property
    def ways_left(self) -> dict[int, str]:
        """Rank -> how its function ended: :func:`how_left`."""
        return {rank: how_left(event, is_script=self.is_script) for rank, event in self.returned.items()}

    @property
    def value_locations(self) -> dict[int, ValueLocation]:
        """Rank -> where its return value is, for ranks that returned or that sent their states when interrupted."""
        locations = dict.fromkeys(self.interruptions, ValueLocation())
        return locations | {rank: event.value_location for rank, event in self.returned.items()}

    @property
    def announced(self) -> dict[int, tuple[ArgPath, ...]]:
        """Rank -> argument paths of the modules and optimizers whose states it has announced."""
        return {rank: event.sends for rank, event in (self.interruptions | self.returned).items()}

    @property
    def delivered(self) -> set[int]:
        """The ranks whose function returned and whose states have all arrived."""
        return {
            rank
            for rank, event in self.returned.items()
            if len(self.sent_states.get(rank, ())) >= len(event.sends)
        }


def how_left(returned: Returned, *, is_script: bool) -> str:
    """Return how a rank left its function without an exception, as a phrase that completes a sentence."""
    if returned.left_by_exit:
        return "called sys.exit(0)"
    return "ended" if is_script else LEFT


LEFT = "returned from the function"
"""The usual way to leave the function."""
