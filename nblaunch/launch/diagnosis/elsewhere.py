"""What went wrong on other nodes, and what the launcher of this one makes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nblaunch.errors import NodeLost, WorkerDied
from nblaunch.events import ExitStatus, Failed, Finished
from nblaunch.launch.diagnosis.reraise import rebuild

Story = tuple[BaseException, int, str]
"""What to raise, the rank that it is about, and a few words."""

SAME_COLLECTIVES = (
    "Every rank must take part in the same collectives: look for a branch, a loop length or a return that depends on "
    "the rank."
)
"""What to do where a rank returned, here or elsewhere, while others still needed it."""


@dataclass
class Elsewhere:
    """How the workers of other nodes ended, as far as it was not in consequence of something else.

    Args:
        places: rank -> its node in words, for all ranks of other nodes.
        failed: ranks whose function raised.
        exits: ranks whose process ended without raising, and when.
        finished: ranks whose function returned.
        lost: rank -> why its node takes no further part, as a sentence. One rank for each such node.
        wants_restart: the set of nodes changes: nothing failed, but all workers start again.
    """

    places: Mapping[int, str] = field(default_factory=dict)
    failed: dict[int, Failed] = field(default_factory=dict)
    exits: dict[int, tuple[ExitStatus, float]] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    wants_restart: bool = False

    @property
    def has_cause(self) -> bool:
        """Whether something went wrong there that explains why workers here had to stop."""
        return bool(self.failed or self.exits or self.lost)


def story_of(elsewhere: Elsewhere, notes: Sequence[str]) -> Story | None:
    """The first thing that went wrong on another node, with ``notes`` below; None where nothing is known to have."""
    times = {rank: failed.time_s for rank, failed in elsewhere.failed.items()}
    times |= {rank: time_s for rank, (_, time_s) in elsewhere.exits.items()}
    if times:
        rank = min(times, key=lambda rank: times[rank])
        place = elsewhere.places[rank]
        if rank in elsewhere.failed:
            return _raised(elsewhere.failed[rank], place, notes)
        return _died(elsewhere, rank, notes)
    for rank, why in elsewhere.lost.items():
        error = NodeLost("\n".join([f"{why}.", *notes]), rank=rank, exitcode=1)
        return error, rank, f"was lost: {why}"
    return None


def left_early(
    elsewhere: Elsewhere, first_error_s: float, waiting: str, notes: Sequence[str]
) -> Story | None:
    """A rank of another node that had returned when ranks here could not go on without it."""
    for rank, finished in sorted(elsewhere.finished.items()):
        if finished.time_s <= first_error_s:
            headline = f"returned from the function while {waiting} still needed it in a collective operation"
            text = f"rank {rank} on {elsewhere.places[rank]} {headline}. {SAME_COLLECTIVES}"
            return WorkerDied("\n".join([text, *notes]), rank=rank, exitcode=0), rank, headline
    return None


def _raised(failed: Failed, place: str, notes: Sequence[str]) -> Story:
    lines = f"{failed.info.type_name}: {failed.info.message}".strip().splitlines()
    note = f"rank {failed.rank} on {place}; its complete log is there"
    return rebuild(failed, [note, *notes], is_from_elsewhere=True), failed.rank, f"{lines[0]} (on {place})"


def _died(elsewhere: Elsewhere, rank: int, notes: Sequence[str]) -> Story:
    status, _ = elsewhere.exits[rank]
    how = f"was {status}" if status.signal_name else f"ended with {status} before the function returned"
    headline = f"{how} (on {elsewhere.places[rank]})"
    text = f"rank {rank} {headline}. Its last lines and its complete log are there."
    return WorkerDied("\n".join([text, *notes]), rank=rank, exitcode=status.code), rank, headline
