"""A number over steps, kept small however long the job: what sparklines and charts draw.

Never draws; see ``chart.py``.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """Points of a quantity, evenly thinned so that they always cover the whole job.

    Args:
        xs: steps, rising.
        ys: values, all finite.
        stride: one of so many points was kept.
        num_seen: points that were added.
        latest: the last point that was added, kept or not; None before the first.
    """

    xs: tuple[float, ...] = ()
    ys: tuple[float, ...] = ()
    stride: int = 1
    num_seen: int = 0
    latest: tuple[float, float] | None = None

    def extended(self, x: float, y: float, max_points: int) -> Curve:
        """The curve with one more point. An ``x`` that does not rise (steps that begin anew) counts on by one."""
        if self.latest is not None and x <= self.latest[0]:
            x = self.latest[0] + 1
        xs, ys, stride = self.xs, self.ys, self.stride
        if self.num_seen % stride == 0:
            if len(xs) >= max_points:
                xs, ys, stride = xs[::2], ys[::2], stride * 2
            xs, ys = (*xs, x), (*ys, y)
        return Curve(xs, ys, stride, self.num_seen + 1, (x, y))

    def points(self) -> list[tuple[float, float]]:
        """What was kept, and the latest point."""
        kept = list(zip(self.xs, self.ys, strict=True))
        return kept if self.latest is None or kept[-1] == self.latest else [*kept, self.latest]
