"""Curves as inline SVG: sparklines for table rows, charts of losses and of logged metrics.

Lines take the colour of the text around them; the one that the words are about has a colour of its own. Every picture
says in words what it shows, in its label and, for charts, in a caption of plain HTML: where SVG is dropped (GitHub,
untrusted notebooks), the caption stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from math import log10

from nblaunch import in_words
from nblaunch.dashboard import colours
from nblaunch.dashboard.curves import Curve
from nblaunch.dashboard.view import JobView
from nblaunch.dashboard.wording import clean, loss

_SPARK_WIDTH, _SPARK_HEIGHT = 72, 16
_SPARK_POINTS = 24  # a point for 3 pixels
_WIDTH, _HEIGHT, _MARGIN = 286, 90, 4  # three of them side by side in the cell of a laptop
_GAP = 20
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
    name = "loss" if len(view.ranks) < 2 else f"loss of {in_words.ranks([rank.rank for rank in drawn])}"
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
    told = _in_words(lines[0])
    whose = f", {next(iter(curves))} in colour" if len(curves) > 1 else ""
    about = f"{whose}{', logarithmic' if is_log else ''}"
    drawn = "".join(
        _polyline(points, is_main=index == 0)
        for index, points in reversed(list(enumerate(_scaled(lines, is_log=is_log))))
    )
    axes = "border-left:1px solid rgba(128,128,128,.4);border-bottom:1px solid rgba(128,128,128,.4)"
    return (
        f'<div style="display:inline-block;vertical-align:bottom;margin:6px {_GAP}px 6px 0;font-size:12px">'
        f'<div style="max-width:{_WIDTH}px;overflow-wrap:anywhere">{escape(name)}'
        f'<span style="opacity:.65">{escape(about)}</span></div>'
        f'<div style="max-width:{_WIDTH}px;opacity:.65">{escape(told)}</div>'
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{escape(f"{name}: {told}")}" '
        f'style="display:block;{axes}">{drawn}</svg></div>'
    )


def _in_words(line: Sequence[Point]) -> str:
    """``0.6931 to 0.0120 in 1,000 steps, lowest 0.0110``."""
    ys = [y for _, y in line]
    first, last = line[0], line[-1]
    text = f"{loss(first[1])} to {loss(last[1])} in {in_words.count(round(last[0] - first[0]), 'step')}"
    # Of what falls, one wants to know how low it was, and of what rises, how high: a line has no room for more.
    if ys[-1] <= ys[0]:
        return text + (f", lowest {loss(min(ys))}" if min(ys) < ys[-1] else "")
    return text + (f", highest {loss(max(ys))}" if max(ys) > ys[-1] else "")


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


def _polyline(points: Sequence[Point], *, is_main: bool) -> str:
    drawn = " ".join(f"{x:.0f},{y:.1f}" for x, y in points)
    colour, width, opacity = (colours.LIVE, 1.6, 1.0) if is_main else ("currentColor", 1.0, 0.35)
    return (
        f'<polyline points="{drawn}" fill="none" stroke="{colour}" stroke-width="{width:g}" '
        f'stroke-linejoin="round" opacity="{opacity:g}"></polyline>'
    )


def _thinned(history: Sequence[float]) -> list[float]:
    """Every so many-th value, and the last one."""
    stride = -(-len(history) // (_SPARK_POINTS - 1))
    kept = list(history[::stride])
    return kept if (len(history) - 1) % stride == 0 else [*kept, history[-1]]
