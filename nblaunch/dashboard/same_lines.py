"""Lines that several ranks print alike, told once.

    [0] a warning          [0-2] a warning
    [1] a warning    ->    [0] loss 0.71
    [2] a warning          [1] loss 0.69
    [0] loss 0.71          [2] loss 0.70
    ...

Owns which lines are the same, and their order: the lines of each rank stay in the order in which it printed them, and
none is lost. Knows no labels.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

MIN_RANKS = 3
"""So many ranks must print a line for it to be told once: of two, each may as well have its own."""

SAME_S = 2.0
"""Seconds between lines that can be the same."""


@dataclass
class _Line:
    text: str
    time_s: float
    ranks: list[int] = field(default_factory=list)


class SameLines:
    """Lines of ranks, oldest first."""

    def __init__(self) -> None:
        self._lines: list[_Line] = []
        self._places: dict[str, list[int]] = {}
        self._next_place: dict[int, int] = {}

    def add(self, rank: int, text: str, time_s: float) -> None:
        """``rank`` printed ``text``, after all that was added of it before."""
        places = self._places.setdefault(text, [])
        first = bisect_left(places, self._next_place.get(rank, 0))
        same = (place for place in places[first:] if time_s - self._lines[place].time_s <= SAME_S)
        place = next(same, len(self._lines))
        if place == len(self._lines):
            self._lines.append(_Line(text, time_s))
            places.append(place)
        self._lines[place].ranks.append(rank)
        self._next_place[rank] = place + 1

    def told(self) -> list[tuple[list[int], str]]:
        """``(ranks, line)``, oldest first; one rank or at least :data:`MIN_RANKS`."""
        told: list[tuple[list[int], str]] = []
        for line in self._lines:
            if len(line.ranks) >= MIN_RANKS:
                told.append((sorted(line.ranks), line.text))
            else:
                told += [([rank], line.text) for rank in line.ranks]
        return told
