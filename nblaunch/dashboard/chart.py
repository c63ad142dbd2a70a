"""Curves as inline SVG: sparklines for table rows, charts of losses and of logged metrics.

Lines take the colour of the text around them. Every picture says in words what it shows, in its label and, for charts,
in a caption of plain HTML: where SVG is dropped (GitHub, untrusted notebooks), the caption stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import log10

from nblaunch.dashboard.curves import Curve
from nblaunch.dashboard.view import JobView, clean
from nblaunch.dashboard.wording import count, loss, who

_SPARK_WIDTH, _SPARK_HEIGHT = 72, 16
_SPARK_POINTS = 24  # a point for 3 pixels
_WIDTH, _HEIGHT, _MARGIN = 300, 90, 4
_MAX_LINES = 8
_MAX_CHARTS = 6
_LOG_RATIO = 100  # from the smallest to the largest value: more is drawn on a logarithmic scale

Point = tuple[float, float]


def sparkline(history: Sequence[float]) -> str:
    """A loss over the whole job as a line as high as text; its first and last values in words. Empty for one value."""
    if len(history) < 2:
        return ""
    shown = history if len(history) <= _SPARK_POINTS else _thinned(history)
    low, high = min(shown), max(shown)
    scale = (_SPARK_HEIGHT - 3) / (high - low) if high > low else 0.0
    step = (_SPARK_WIDTH - 3) / (len(shown) - 1)
    points = " ".join(
        f"{1.5 + index * step:.0f},{_SPARK_HEIGHT - 1.5 - (value - low) * scale:.1f}"
        for index, value in enumerate(shown)
    )
    label = f"loss from {history[0]:.4g} to {history[-1]:.4g}"
    return (
        f'<svg width="{_SPARK_WIDTH}" height="{_SPARK_HEIGHT}" role="img" style="vertical-align:middle;opacity:.75">'
        f'<title>{label}</title><polyline points="{points}" fill="none" stroke="currentColor"></polyline></svg>'
    )


def charts(view: JobView) -> str:
    """Charts of the losses of the first ranks and of logged metrics, side by side; empty where nothing was measured."""
    drawn = [rank for rank in view.ranks[:_MAX_LINES] if len(rank.losses.points()) > 1]
    losses = {f"rank {rank.rank}": rank.losses for rank in drawn}
    name = "loss" if len(view.ranks) < 2 else f"loss of {who([rank.rank for rank in drawn])}"
    parts = [chart(name, losses)] if losses else []
    for name, curve in view.curves.items():
        if len(parts) >= _MAX_CHARTS:
            break
        if len(curve.points()) > 1:
            parts.append(chart(clean(name), {"": curve}))
    return f"<div>{''.join(parts)}</div>" if parts else ""


def chart(name: str, curves: Mapping[str, Curve]) -> str:
    """One chart with a caption in words.

    Args:
        name: what is drawn.
        curves: by label; the first one is drawn strongest, and its values are those in the caption. At least one, of
            two points or more.
    """
    lines = [curve.points() for curve in curves.values()]
    ys = [y for line in lines for _, y in line]
    is_log = min(ys) > 0 and max(ys) / min(ys) >= _LOG_RATIO
    whose = f" ({next(iter(curves))})" if len(curves) > 1 else ""
    caption = _caption(name, lines[0], whose, is_log=is_log)
    drawn = "".join(
        _polyline(points, opacity=1.0 if index == 0 else 0.4)
        for index, points in reversed(list(enumerate(_scaled(lines, is_log=is_log))))
    )
    axes = "border-left:1px solid rgba(128,128,128,.4);border-bottom:1px solid rgba(128,128,128,.4)"
    return (
        '<div style="display:inline-block;vertical-align:bottom;margin:6px 24px 6px 0">'
        f'<div style="font-size:12px;opacity:.75;max-width:{_WIDTH}px">{escape(caption)}</div>'
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{escape(caption)}" '
        f'style="display:block;{axes}">{drawn}</svg></div>'
    )


def _caption(name: str, line: Sequence[Point], whose: str, *, is_log: bool) -> str:
    """``loss of ranks 0-3: 0.6931 to 0.0120 (rank 0) in 1,000 steps, lowest 0.0110``."""
    ys = [y for _, y in line]
    first, last = line[0], line[-1]
    text = f"{name}: {loss(first[1])} to {loss(last[1])}{whose} in {count(round(last[0] - first[0]), 'step')}"
    if min(ys) < min(ys[0], ys[-1]):
        text += f", lowest {loss(min(ys))}"
    if max(ys) > max(ys[0], ys[-1]):
        text += f", highest {loss(max(ys))}"
    return text + (", logarithmic" if is_log else "")


def _scaled(lines: Sequence[Sequence[Point]], *, is_log: bool) -> list[list[Point]]:
    """Points in pixels, all lines on the same axes."""
    heights = [[log10(y) if is_log else y for _, y in line] for line in lines]
    low_x, high_x = min(line[0][0] for line in lines), max(line[-1][0] for line in lines)
    low_y, high_y = min(map(min, heights)), max(map(max, heights))
    width, height = _WIDTH - 2 * _MARGIN, _HEIGHT - 2 * _MARGIN
    scale_x = width / (high_x - low_x) if high_x > low_x else 0.0
    scale_y = height / (high_y - low_y) if high_y > low_y else 0.0
    return [
        [
            (_MARGIN + (x - low_x) * scale_x, _HEIGHT - _MARGIN - (y - low_y) * scale_y)
            for (x, _), y in zip(line, ys, strict=True)
        ]
        for line, ys in zip(lines, heights, strict=True)
    ]


def _polyline(points: Sequence[Point], *, opacity: float) -> str:
    drawn = " ".join(f"{x:.0f},{y:.1f}" for x, y in points)
    return (
        f'<polyline points="{drawn}" fill="none" stroke="currentColor" stroke-width="1.4" '
        f'stroke-linejoin="round" opacity="{opacity:g}"></polyline>'
    )


def _thinned(history: Sequence[float]) -> list[float]:
    """Every so many-th value, and the last one."""
    stride = -(-len(history) // (_SPARK_POINTS - 1))
    kept = list(history[::stride])
    return kept if (len(history) - 1) % stride == 0 else [*kept, history[-1]]
