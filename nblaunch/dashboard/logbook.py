"""The last lines of each rank and of all of them, for a pane that shows logs while a job runs.

The view of a job keeps a few lines of all ranks together, for the summary; here are enough to follow one rank.
"""

from __future__ import annotations

from collections import deque

from nblaunch.dashboard.wording import clean
from nblaunch.events import Displayed, Event, LogLines, Note

NUM_LINES = 60
"""Lines that are kept of each rank, and of all."""


class LogBook:
    """The last lines of each rank and of all, as they came. Knows no widgets."""

    def __init__(self) -> None:
        self.num_seen: dict[int, int] = {}
        self._by_rank: dict[int, deque[str]] = {}
        self._all: deque[tuple[float, int, int, str]] = deque(maxlen=NUM_LINES)
        self._count = 0

    def add(self, event: Event) -> None:
        """Remember what ``event`` says, if it is something that a rank printed or displayed."""
        if isinstance(event, LogLines):
            for line in event.lines[-NUM_LINES:]:
                self._add_line(event, clean(line))
            self.num_seen[event.rank] = self.num_seen.get(event.rank, 0) + len(event.lines)
        elif isinstance(event, Displayed) and not event.update:
            text = clean(str(event.data.get("text/plain", ""))) or clean(", ".join(event.data))
            self._add_line(event, f"displayed: {text}")
        elif isinstance(event, Note) and event.rank >= 0:
            self._add_line(event, clean(event.text))

    def of_all(self) -> list[tuple[int, str]]:
        """``(rank, line)``, oldest first by the clocks of the workers."""
        return [(rank, line) for _, _, rank, line in sorted(self._all)]

    def of_rank(self, rank: int) -> list[str]:
        """Its last lines, as they came."""
        return list(self._by_rank.get(rank, ()))

    def _add_line(self, event: Event, line: str) -> None:
        self._count += 1
        self._all.append((event.time_s, self._count, event.rank, line))
        self._by_rank.setdefault(event.rank, deque(maxlen=NUM_LINES)).append(line)
