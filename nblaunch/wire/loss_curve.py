"""The losses of a rank over its whole job, in at most :data:`MAX_BINS` means: small enough for its slot of the board.

    steps 1 2 3 4 5 6 7 8 | 9 ...            a bin holds the mean loss of 1 step at first; when all bins are full,
    bins  ─┬─ ─┬─ ─┬─ ─┬─                    neighbours are merged, and each holds that of 2 steps, then 4, 8 ...

Bins end at fixed steps, whenever they are read: two runs with equal losses have equal curves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_BINS = 64
"""Largest number of complete bins; one that is not complete may follow."""


@dataclass(frozen=True)
class LossCurve:
    """Means of the losses in bins of equally many optimizer steps.

    Args:
        num_steps: optimizer steps so far, the end of the last bin.
        steps_per_bin: of every bin but the last, which may have fewer.
        means: one per bin; may be not finite.
    """

    num_steps: int = 0
    steps_per_bin: int = 1
    means: tuple[float, ...] = ()

    def points(self) -> tuple[tuple[float, float], ...]:
        """Return ``(last step, mean)`` of every bin whose mean is finite."""
        return tuple(
            (float(min((index + 1) * self.steps_per_bin, self.num_steps)), mean)
            for index, mean in enumerate(self.means)
            if math.isfinite(mean)
        )


NO_LOSSES = LossCurve()


@dataclass
class _Bin:
    total: float
    count: int

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan


class LossBins:
    """The complete bins of a curve, merged in pairs when there are :data:`MAX_BINS`."""

    def __init__(self) -> None:
        self.steps_per_bin = 1
        self._bins: list[_Bin] = []

    def add(self, total: float, count: int) -> None:
        """Add the next bin: the sum of its losses, and how many they are."""
        self._bins.append(_Bin(total, count))
        if len(self._bins) == MAX_BINS:
            pairs = zip(self._bins[::2], self._bins[1::2], strict=True)
            self._bins = [_merged(one, other) for one, other in pairs]
            self.steps_per_bin *= 2

    def curve(self, num_steps: int, rest: float, num_rest: int) -> LossCurve:
        """Return the curve; ``rest`` is the sum of ``num_rest`` losses of the bin that is not complete."""
        bins: Sequence[_Bin] = [*self._bins, _Bin(rest, num_rest)] if num_rest else self._bins
        return LossCurve(num_steps, self.steps_per_bin, tuple(one.mean for one in bins))


def _merged(one: _Bin, other: _Bin) -> _Bin:
    """Return the sum of two bins; one that is not finite is left out, so that it does not spread over the curve."""
    if not math.isfinite(other.total):
        return one
    if not math.isfinite(one.total):
        return other
    return _Bin(one.total + other.total, one.count + other.count)
