"""Charts as SVG: losses and logged metrics over steps, with axes, ticks and a legend.

    loss  ━ mean  ─ each rank
    2.3 to 0.413 in 320 steps, min 0.399
    2.0 │╲
    1.0 │ ╲___
        │     ╲_______
    step└──┬────┬────┬──
          100  200  300

The ranks' curves are thin lines behind the curve of their mean. A chart depends only on the values, so identical runs
have identical charts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from math import ceil, floor, log10

from nblaunch import formatting
from nblaunch.dashboard.view import JobView
from nblaunch.formatting import single_line

Point = tuple[float, float]

LINE_COLOUR = "#3b82d6"
"""Colour of the curve in front."""

# Widths in pixels: a cell on a laptop has room for three charts, or for a wide and a normal one, side by side.
_WIDTH, _WIDE = 256, 526
LIVE_HEIGHT = 150
"""Height of a chart in pixels, excluding its text, while the job runs."""
_HEIGHT = 196
_LEFT, _TOP = 46, 6  # edges of the curves, in pixels
_RIGHT_GAP, _BOTTOM_GAP = 6, 18
_GAP = 14
_THIN_OPACITY = ".5"  # of thin lines and axes
_MAX_LINES = 8  # raw lines of ranks
_MAX_CHARTS = 6
_MAX_POINTS, _MAX_RAW_POINTS = 64, 192  # of a line; of all raw lines together
_LOG_RATIO = 100  # from this ratio of the largest to the smallest value, the scale is logarithmic


def charts(view: JobView) -> list[str]:
    """Return charts of the losses and of logged metrics, to be placed side by side.

    The chart of the losses is twice as wide as the others. All charts are taller when the job has ended.

    A metric that has not changed, such as a constant learning rate, has no chart.
    """
    drawn = {rank.rank: losses for rank in view.ranks if len(losses := rank.losses) > 1}
    height = _HEIGHT if view.is_over else LIVE_HEIGHT
    parts = [_losses(drawn, len(view.ranks), (_WIDE, height))] if drawn else []
    logged = [
        (single_line(name), points)
        for name, curve in view.curves.items()
        if len(points := curve.points()) > 1 and not curve.is_flat
    ]
    return [
        *parts,
        *(chart(name, points, size=(_WIDTH, height)) for name, points in logged[: _MAX_CHARTS - len(parts)]),
    ]


def _losses(drawn: Mapping[int, Sequence[Point]], num_ranks: int, size: tuple[int, int]) -> str:
    """Return the chart of the losses: the mean of all ranks, drawn over the curves of the first few ranks."""
    lines = list(drawn.values())
    if num_ranks == 1:
        return chart("loss", lines[0], first_step=0, size=size)
    shown = list(drawn)[:_MAX_LINES]
    return chart(
        "loss",
        mean_of(lines),
        lines[:_MAX_LINES],
        name_of_raw="each rank" if len(shown) == len(drawn) else formatting.ranks(shown),
        first_step=0,
        size=size,
    )


def chart(
    name: str,
    main: Sequence[Point],
    raw: Sequence[Sequence[Point]] = (),
    *,
    name_of_raw: str = "",
    first_step: float | None = None,
    size: tuple[int, int] = (_WIDTH, LIVE_HEIGHT),
) -> str:
    """Return one chart with its legend and caption.

    Args:
        name: name of the quantity.
        main: the main line, with at least two points.
        raw: thin lines behind the main line, which is their mean.
        name_of_raw: name of the thin lines in the legend.
        first_step: step that the caption counts from; None: the first point.
        size: size of the picture, in pixels.
    """
    width, height = size
    front = thinned(main)
    behind = [thinned(line, min(_MAX_RAW_POINTS // len(raw), _MAX_POINTS)) for line in raw]
    axes = _Axes.around([front, *behind], size)
    caption = _caption(main, main[0][0] if first_step is None else first_step)
    drawn = [
        axes.drawn(),
        _group([_path(axes, line, 0) for line in behind], f'stroke="currentColor" opacity="{_THIN_OPACITY}"'),
        _group([_path(axes, front, 1)], f'stroke="{LINE_COLOUR}" stroke-width="1.7"'),
    ]
    legend = _legend(name_of_raw) if raw else ""
    text = f"width:{width}px;overflow:hidden;text-overflow:ellipsis;white-space:nowrap"
    return (
        f'<div style="display:inline-block;vertical-align:bottom;margin:6px {_GAP}px 6px 0;font-size:12px">'
        f'<div style="{text}"><b>{escape(name)}</b>{legend}</div>'
        f'<div style="{text};opacity:.75;font-size:11px">{escape(caption)}</div>'
        f'<svg width="{width}" height="{height}" role="img" aria-label="{escape(f"{name}: {caption}")}" '
        f'style="display:block">{"".join(drawn)}</svg></div>'
    )


def mean_of(lines: Sequence[Sequence[Point]]) -> list[Point]:
    """Return the mean of curves with at least two points each, whose spacings may differ by a factor of 2, 4, 8..."""
    # The last point of a line is closer to the previous one if its bin is incomplete, and points are missing where the
    # loss was NaN.
    width = max(map(_spacing, lines)) or 1.0
    bins: dict[int, tuple[float, float, int]] = {}
    for line in lines:
        for x, y in line:
            number = ceil(x / width)
            last_x, total, count = bins.get(number, (x, 0.0, 0))
            bins[number] = (x if x > last_x else last_x, total + y, count + 1)
    return [(x, total / count) for _, (x, total, count) in sorted(bins.items())]


def _spacing(line: Sequence[Point]) -> float:
    """Return the median difference between the x values of neighbouring points."""
    distances = sorted([b[0] - a[0] for a, b in pairwise(line)])
    return distances[len(distances) // 2]


def thinned(line: Sequence[Point], max_points: int = _MAX_POINTS) -> list[Point]:
    """Return evenly spaced points of a line, including the first and the last."""
    if len(line) <= max_points:
        return list(line)
    step = (len(line) - 1) / (max_points - 1)
    return [line[round(index * step)] for index in range(max_points)]


def ticks(low: float, high: float, max_ticks: int, *, are_whole: bool = False) -> list[float]:
    """Return round numbers (1, 2 or 5 times a power of ten apart) from ``low`` to ``high``; integers on request."""
    if high <= low:
        return [low]
    exponent = floor(log10((high - low) / max_ticks))
    exponent = max(exponent, 0) if are_whole else exponent
    for size in (1, 2, 5, 10, 20):
        step = float(f"{size}e{exponent}")
        first, last = ceil(low / step - 1e-9), floor(high / step + 1e-9)
        if last - first < max_ticks:
            return [float(f"{number * step:.12g}") for number in range(first, last + 1)]
    return [low]


def _log_ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """Return powers of ten from ``low`` to ``high``."""
    first, last = ceil(log10(low) - 1e-9), floor(log10(high) + 1e-9)
    stride = -(-(last - first + 1) // max_ticks)
    return [float(f"1e{exponent}") for exponent in range(first, last + 1, stride)]


def _tick_texts(values: Sequence[float]) -> list[str]:
    """Return the numbers as text: ``0.90``, ``0.95``, ``1.00``, or ``1,500``, or ``20k``, or ``1e-5``."""
    size = max(map(abs, values), default=0.0)
    if size and not 1e-3 <= size < 1e7:
        return [
            re.sub(r"e([+-])0*", lambda sign: f"e{sign[1].strip('+')}", f"{value:.3g}") for value in values
        ]
    if size >= 10_000:
        return [f"{value / 1000:,.6g}k" for value in values]
    digits = max(len(f"{value:.6g}".partition(".")[2]) for value in values)
    return [f"{value:,.{digits}f}" for value in values]


@dataclass(frozen=True)
class _Axes:
    """The axes of a chart, which convert values to pixels."""

    low_x: float
    high_x: float
    low_y: float
    high_y: float
    is_log: bool
    counts: bool
    width: int
    height: int

    @classmethod
    def around(cls, lines: Sequence[Sequence[Point]], size: tuple[int, int]) -> _Axes:
        """Return axes for all points of ``lines``, in a picture of this width and height."""
        xs = [x for line in lines for x, _ in line]
        ys = [y for line in lines for _, y in line]
        is_log = min(ys) > 0 and max(ys) / min(ys) >= _LOG_RATIO
        counts = all(x == int(x) for x in xs)
        return cls(min(xs), max(xs), min(ys), max(ys), is_log, counts, *size)

    @property
    def right(self) -> int:
        """The right edge of the curves."""
        return self.width - _RIGHT_GAP

    @property
    def bottom(self) -> int:
        """The lower edge of the curves."""
        return self.height - _BOTTOM_GAP

    def x(self, value: float) -> float:
        """Return the distance from the left edge, in pixels."""
        return _placed(value, self.low_x, self.high_x, _LEFT + 1, self.right)

    def y(self, value: float) -> float:
        """Return the distance from the top edge, in pixels."""
        if self.is_log:
            return _placed(log10(value), log10(self.low_y), log10(self.high_y), self.bottom - 2, _TOP)
        return _placed(value, self.low_y, self.high_y, self.bottom - 2, _TOP)

    def _texts(self, at_y: Sequence[float]) -> list[str]:
        return [_tick_texts([y])[0] for y in at_y] if self.is_log else _tick_texts(at_y)

    def drawn(self) -> str:
        """Return both axes with ticks and numbers, and faint lines at the ticks of the vertical axis."""
        at_y = (_log_ticks if self.is_log else ticks)(self.low_y, self.high_y, 5)
        at_x = ticks(self.low_x, self.high_x, self.width // 50, are_whole=self.counts)
        across = "".join(f"M{_LEFT} {self.y(y):.0f}H{self.right}" for y in at_y)
        notches = "".join(f"M{self.x(x):.0f} {self.bottom}v3" for x in at_x)
        numbers = [
            *(
                f'<text x="{_LEFT - 4}" y="{self.y(y) + 3.5:.0f}">{text}</text>'
                for y, text in zip(at_y, self._texts(at_y), strict=True)
            ),
            f'<text x="{_LEFT - 12}" y="{self.height - 4}">step</text>',
            *([f'<text x="{self.right}" y="{_TOP + 6}">log scale</text>'] if self.is_log else []),
            *(self._under(self.x(x), text) for x, text in zip(at_x, _tick_texts(at_x), strict=True)),
        ]
        return (
            f'<path d="{across}" stroke="currentColor" opacity=".15"></path>'
            f'<path d="M{_LEFT} {_TOP - 4}V{self.bottom}H{self.right}{notches}" fill="none" stroke="currentColor" '
            f'opacity="{_THIN_OPACITY}"></path>'
            f'<g font-size="10" fill="currentColor" opacity=".75" text-anchor="end">{"".join(numbers)}</g>'
        )

    def _under(self, x: float, text: str) -> str:
        """Return a number below the horizontal axis, moved to the left if it would not fit."""
        if x + 3 * len(text) > self.width:
            return f'<text x="{self.width - 1}" y="{self.height - 4}">{text}</text>'
        return f'<text x="{x:.0f}" y="{self.height - 4}" text-anchor="middle">{text}</text>'


def _placed(value: float, low: float, high: float, at_low: float, at_high: float) -> float:
    part = (value - low) / (high - low) if high > low else 0.5
    return at_low + part * (at_high - at_low)


def _group(lines: Sequence[str], style: str) -> str:
    """Return lines in a common style.

    The opacity is set on the group, not on each line, because overlapping faint lines would look darker.
    """
    return f'<g fill="none" stroke-linejoin="round" {style}>{"".join(lines)}</g>' if lines else ""


def _path(axes: _Axes, line: Sequence[Point], digits: int) -> str:
    """Return a line in which each point is relative to the previous one, because this takes the fewest bytes."""
    places = [(round(axes.x(x)), round(axes.y(y), digits)) for x, y in line]
    steps = " ".join(f"{x - left} {y - top:.{digits}f}" for (left, top), (x, y) in pairwise(places))
    return f'<path d="M{places[0][0]} {places[0][1]:.{digits}f}l{steps}"></path>'


def _legend(raw: str) -> str:
    """Return the names of the lines."""
    return (
        f'<span style="padding-left:.7em"><span style="color:{LINE_COLOUR}">━</span> mean '
        f'<span style="opacity:{_THIN_OPACITY}">─</span> {escape(raw)}</span>'
    )


def _caption(line: Sequence[Point], first_step: float) -> str:
    """Return the caption of a curve: ``0.693 to 0.012 in 1,000 steps, min 0.011``."""
    ys = [y for _, y in line]
    first, last = line[0], line[-1]
    text = f"{first[1]:.3g} to {last[1]:.3g} in {formatting.count(round(last[0] - first_step), 'step')}"
    # Add the minimum of a falling curve or the maximum of a rising one, because the line has room for one number only.
    if ys[-1] <= ys[0]:
        return text + (f", min {min(ys):.3g}" if min(ys) < ys[-1] else "")
    return text + (f", max {max(ys):.3g}" if max(ys) > ys[-1] else "")
