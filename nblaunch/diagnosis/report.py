"""How one attempt of a job went: the plain facts, written by the supervisor and read by everyone else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from nblaunch.diagnosis.memory import MemoryRecord
from nblaunch.events import ExitStatus, Failed, Finished, WeightsSent
from nblaunch.wire.board import Sample
from nblaunch.wire.modules import Place


@dataclass
class RemoteFailures:
    """How the workers of other nodes ended, apart from consequences of other failures.

    Args:
        labels: rank -> its node in words, for all ranks of other nodes.
        failed: ranks whose function raised.
        exits: ranks whose process ended without raising, and when.
        finished: ranks whose function returned.
        lost: rank -> why its node takes no further part, as a sentence. One rank for each such node.
        wants_restart: the set of nodes changes: nothing failed, but all workers start again.
    """

    labels: Mapping[int, str] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    exits: dict[int, tuple[ExitStatus, float]] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    wants_restart: bool = False

    @property
    def has_cause(self) -> bool:
        """Whether something went wrong there that explains why workers here had to stop."""
        return bool(self.failed or self.exits or self.lost)


@dataclass
class AttemptReport:
    """How one attempt went, rank by rank. Each rank of this node is in ``exits``; times are wall clock seconds.

    Args:
        finished: ranks whose function returned.
        weights: rank -> place in the arguments -> the weights that it has sent of the module there.
        failed: ranks whose function raised, in order of arrival.
        exits: how each process ended, and when that was seen.
        signalled: rank -> when it was first sent a signal by the launcher, for those that were.
        interrupted: the job was interrupted.
        cancelled: it was cancelled.
        stopped_early: all ranks were asked, at the same step, to leave their loops.
        last_samples: the last sample of the board.
        memory: of host and workers while it ran.
        unkillable: rank -> a sentence about its process, which SIGKILL did not end and which was left behind.
        hang: where every rank was when the job was stopped because it hung; empty otherwise.
        remote: failures of ranks on other nodes.
    """

    finished: dict[int, Finished] = field(default_factory=dict)
    weights: dict[int, dict[Place, WeightsSent]] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    exits: dict[int, tuple[ExitStatus, float]] = field(default_factory=dict)
    signalled: dict[int, float] = field(default_factory=dict)
    interrupted: bool = False
    cancelled: bool = False
    stopped_early: bool = False
    last_samples: list[Sample] = field(default_factory=list)
    memory: MemoryRecord | None = None
    unkillable: dict[int, str] = field(default_factory=dict)
    hang: tuple[str, ...] = ()
    remote: RemoteFailures = field(default_factory=RemoteFailures)

    @property
    def is_success(self) -> bool:
        """Whether the function returned on every rank, and the job was not stopped."""
        return not (self.interrupted or self.cancelled or self.hang) and len(self.finished) == len(self.exits)

    @property
    def delivered(self) -> set[int]:
        """Ranks whose function returned and who have nothing more to send."""
        return {
            rank
            for rank, event in self.finished.items()
            if len(self.weights.get(rank, ())) >= len(event.sends)
        }
