"""The report of a session's command, and the outboxes for its results."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field

from nblaunch.diagnosis.report import AttemptReport
from nblaunch.events import Event, Started
from nblaunch.wire import outbox
from nblaunch.wire.board import create_memory_file
from nblaunch.wire.outbox import RankResult


@dataclass
class CommandReport(AttemptReport):
    """The facts about one command of a session, collected from the events of its ranks as for an attempt.

    Args:
        number: number of the command in its session; 0 = none.
        outboxes: rank -> memory file for its results, for all ranks that execute the command.
        begun: ranks that have begun the command.
        has_torch: whether a rank has imported torch.
    """

    number: int = 0
    outboxes: dict[int, int] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    has_torch: bool = False

    def add(self, event: Event) -> None:
        """Record an event of a rank, including the end of its process."""
        if isinstance(event, Started):
            self.begun.add(event.rank)
        if event.rank in self.outboxes:
            super().add(event)

    def open_outboxes(self, ranks: Iterable[int]) -> None:
        """Create the outboxes of the ranks that execute the command.

        Raises:
            OSError: this process has no descriptors left.
        """
        for rank in ranks:
            self.outboxes[rank] = create_memory_file(f"nblaunch-outbox-{rank}")

    @property
    def busy(self) -> set[int]:
        """The ranks that have neither finished the command nor died."""
        return self.outboxes.keys() - self.exits.keys()

    @property
    def unfinished(self) -> set[int]:
        """The ranks that have reported neither a value nor a failure."""
        return self.outboxes.keys() - self.returned.keys() - self.failed.keys()

    def results(self) -> dict[int, RankResult]:
        """Read the outboxes of the ranks that returned, or that sent their states after an interrupt."""
        return {
            rank: outbox.read(self.outboxes[rank], location, self.sent_states.get(rank, {}))
            for rank, location in sorted(self.value_locations.items())
        }

    def close(self) -> None:
        """Close the outboxes. Results that were read stay valid."""
        while self.outboxes:
            os.close(self.outboxes.popitem()[1])
