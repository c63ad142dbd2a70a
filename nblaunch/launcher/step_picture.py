"""A typical step and the slowest step of each rank, as a picture of a timeline for notebooks.

slices ──> steps of each rank, which end with an optimizer step ──> median and slowest ──> one bar each, in SVG
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from nblaunch import formatting

_COLOURS = {
    "data": "#e0a030",
    "forward": "#3b82d6",
    "backward": "#8b6fd6",
    "optimizer": "#2f9e6e",
    "save": "#e05656",
    "evaluation": "#4aa8b8",
    "garbage collection": "#b0568a",
}
_COLLECTIVE = "#8a8f98"
_MAX_RANKS = 16
_WIDTH, _LEFT, _ROW, _BAR = 720, 130, 22, 14
_NUM_WARM = 1
"""Number of first steps that are left out, because they create what later steps reuse."""

Slice = tuple[str, float, float]
"""Name, begin and end, in microseconds."""


@dataclass(frozen=True)
class Step:
    """A step of a rank.

    Args:
        number: number of the step, from 1.
        began: end of the previous step.
        ended: end of the optimizer step.
        slices: periods of the rank's work, in order.
    """

    number: int
    began: float
    ended: float
    slices: Sequence[Slice] = field(default=())

    @property
    def length(self) -> float:
        """The length in microseconds."""
        return self.ended - self.began


def steps_of(slices: Iterable[Slice]) -> list[Step]:
    """Return the steps of a rank except the first; ``slices`` are all slices of the rank."""
    steps: list[Step] = []
    pending: list[Slice] = []
    began, number = None, 0
    for name, begin, end in sorted(slices, key=lambda item: (item[1], -item[2])):
        pending.append((name, begin, end))
        if name == "optimizer":
            number += 1
            if began is not None and number > _NUM_WARM:
                steps.append(Step(number, began, end, tuple(pending)))
            began, pending = end, []
    return steps


def picture(by_rank: dict[int, list[Slice]]) -> str:
    """Return a typical step and the slowest step of each rank as HTML; empty if no rank has taken steps.

    Args:
        by_rank: rank -> its slices.
    """
    all_steps = {rank: steps_of(slices) for rank, slices in sorted(by_rank.items())}
    steps = {rank: taken for rank, taken in all_steps.items() if taken}
    if not steps:
        return ""
    shown = dict(list(steps.items())[:_MAX_RANKS])
    typical = {
        rank: sorted(taken, key=lambda step: step.length)[len(taken) // 2] for rank, taken in shown.items()
    }
    slowest = {rank: max(taken, key=lambda step: step.length) for rank, taken in shown.items()}
    names = dict.fromkeys(
        name for part in (typical, slowest) for step in part.values() for name, _, _ in step.slices
    )
    left_out = len(steps) - len(shown)
    more = f"<div>and {formatting.count(left_out, 'rank')} more</div>" if left_out else ""
    return (
        '<div style="font-family: sans-serif; font-size: 12px">'
        + _panel("typical step (median)", typical)
        + _panel("slowest step", slowest)
        + more
        + _legend(names)
        + "</div>"
    )


def _panel(title: str, steps: dict[int, Step]) -> str:
    """Return one bar per rank; the longest fills the width."""
    scale = (_WIDTH - _LEFT) / max(step.length for step in steps.values())
    rows = "".join(_row(rank, step, index * _ROW, scale) for index, (rank, step) in enumerate(steps.items()))
    return (
        f"<div>{title}</div>"
        f'<svg width="{_WIDTH}" height="{len(steps) * _ROW}" role="img" aria-label="{title} of each rank">{rows}</svg>'
    )


def _row(rank: int, step: Step, top: int, scale: float) -> str:
    label = f"rank {rank}: {_milliseconds(step.length)}"
    bars = [
        f'<rect x="{_LEFT}" y="{top}" width="{step.length * scale:.1f}" height="{_BAR}" fill="#8a8f98" '
        f'fill-opacity="0.2"><title>step {step.number}: {_milliseconds(step.length)}</title></rect>'
    ]
    for name, began, ended in step.slices:
        # Slices inside others, such as collectives in an evaluation, are drawn over them.
        left = _LEFT + max(0.0, began - step.began) * scale
        tooltip = f"{name}, {_milliseconds(ended - began)}"
        bars.append(
            f'<rect x="{left:.1f}" y="{top}" width="{max((ended - began) * scale, 0.3):.1f}" height="{_BAR}" '
            f'fill="{_colour(name)}"><title>{escape(tooltip)}</title></rect>'
        )
    text = f'<text x="0" y="{top + _BAR - 3}" fill="currentColor">{label}</text>'
    return text + "".join(bars)


def _legend(names: Iterable[str]) -> str:
    parts = [
        f'<span style="margin-right: 12px"><span style="color: {_colour(name)}">&#9632;</span> {escape(name)}</span>'
        for name in names
    ]
    return f"<div>{''.join(parts)}</div>"


def _colour(name: str) -> str:
    return _COLOURS.get(name, _COLLECTIVE)


def _milliseconds(time_us: float) -> str:
    return f"{time_us / 1e3:,.1f} ms" if time_us < 1e5 else f"{time_us / 1e3:,.0f} ms"
