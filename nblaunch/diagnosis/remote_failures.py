"""Failures on other nodes, and the exceptions that the launcher of this one raises for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nblaunch.diagnosis.reraise import rebuild
from nblaunch.errors import NodeLost, WorkerDied
from nblaunch.events import ExitStatus, Failed, Finished

Explanation = tuple[BaseException, int, str]
"""What to raise, the rank that it is about, and a few words."""

SAME_COLLECTIVES = (
    "Every rank must take part in the same collectives: look for a branch, a loop length or a return that depends on "
    "the rank."
)
"""What to do where a rank returned, on any node, while others still needed it."""


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


def explain_remote(remote: RemoteFailures, notes: Sequence[str]) -> Explanation | None:
    """Return the first failure on another node, with ``notes`` below; None where none is known."""
    times = {rank: failed.time_s for rank, failed in remote.failed.items()}
    times |= {rank: time_s for rank, (_, time_s) in remote.exits.items()}
    if times:
        rank = min(times, key=lambda rank: times[rank])
        label = remote.labels[rank]
        if rank in remote.failed:
            return _raised(remote.failed[rank], label, notes)
        return _died(remote, rank, notes)
    for rank, why in remote.lost.items():
        error = NodeLost("\n".join([f"{why}.", *notes]), rank=rank, exitcode=1)
        return error, rank, f"was lost: {why}"
    return None


def left_early(
    remote: RemoteFailures, first_error_s: float, waiting: str, notes: Sequence[str]
) -> Explanation | None:
    """Return a rank of another node that had returned when ranks here could not go on without it."""
    for rank, finished in sorted(remote.finished.items()):
        if finished.time_s <= first_error_s:
            headline = f"returned from the function while {waiting} still needed it in a collective operation"
            text = f"rank {rank} on {remote.labels[rank]} {headline}. {SAME_COLLECTIVES}"
            return WorkerDied("\n".join([text, *notes]), rank=rank, exitcode=0), rank, headline
    return None


def _raised(failed: Failed, label: str, notes: Sequence[str]) -> Explanation:
    lines = f"{failed.info.type_name}: {failed.info.message}".strip().splitlines()
    note = f"rank {failed.rank} on {label}; its complete log is there"
    return rebuild(failed, [note, *notes], is_remote=True), failed.rank, f"{lines[0]} (on {label})"


def _died(remote: RemoteFailures, rank: int, notes: Sequence[str]) -> Explanation:
    status, _ = remote.exits[rank]
    how = f"was {status}" if status.signal_name else f"ended with {status} before the function returned"
    headline = f"{how} (on {remote.labels[rank]})"
    text = f"rank {rank} {headline}. Its last lines and its complete log are there."
    return WorkerDied("\n".join([text, *notes]), rank=rank, exitcode=status.code), rank, headline
