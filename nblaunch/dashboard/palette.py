"""Colours and shapes of states, for light and dark themes.

The colour of running text is not known, only inherited. So coloured text mixes its colour with the inherited one, which
keeps a contrast of at least 4.5 to 1 (WCAG 2.2, 1.4.3) on any background that the theme's own text is legible on. Bars
and curves, which are no text, have the colour itself. States of different colours have different shapes as well.
"""

from __future__ import annotations

from nblaunch.events import WorkerState

LIVE, GOOD, BAD, CALM = "#3b82d6", "#2f9e6e", "#e05656", "#8a8f98"
CAUTION, VIOLET = "#b97c12", "#8b6fd6"
COLOURS = (LIVE, GOOD, BAD, CALM, CAUTION, VIOLET)

INK_PERCENT = 55
"""Share of the named colour in coloured text."""

MUTED = "opacity:.7"
"""Style of text of less weight. Not for text inside such text, which would become too faint."""

STATE_COLOURS = {
    WorkerState.STARTING: CALM,
    WorkerState.RUNNING: LIVE,
    WorkerState.TRAINING: LIVE,
    WorkerState.EVALUATING: VIOLET,
    WorkerState.WAITING: CAUTION,
    WorkerState.COMPILING: VIOLET,
    WorkerState.FINISHING: GOOD,
    WorkerState.DONE: GOOD,
    WorkerState.FAILED: BAD,
    WorkerState.STOPPED: CALM,
}

STATE_SHAPES = {
    WorkerState.STARTING: "○",
    WorkerState.RUNNING: "●",
    WorkerState.TRAINING: "●",
    WorkerState.EVALUATING: "◆",
    WorkerState.WAITING: "◐",
    WorkerState.COMPILING: "◇",
    WorkerState.FINISHING: "✓",
    WorkerState.DONE: "✓",
    WorkerState.FAILED: "✗",
    WorkerState.STOPPED: "■",
}

MARKED_SHAPE = "▲"
"""Shape of a rank that differs from the others while it runs."""


def outcome_colour(outcome: str) -> str:
    """Return the colour of a job; ``outcome`` as in :class:`nblaunch.events.JobEnded`, empty while it runs."""
    return {"": LIVE, "done": GOOD, "failed": BAD}.get(outcome, CALM)


def outcome_shape(outcome: str) -> str:
    """Return the shape that stands for a job."""
    return {"": "●", "done": "✓", "failed": "✗"}.get(outcome, "■")


def ink(colour: str) -> str:
    """Return the style of text in ``colour``; browsers without ``color-mix`` use the colour itself."""
    return f"color:{colour};color:color-mix(in srgb,{colour} {INK_PERCENT}%,currentColor)"


def shape_of(state: WorkerState, *, is_marked: bool = False) -> tuple[str, str]:
    """Return the shape of a state and its colour."""
    if is_marked and not state.is_final:
        return MARKED_SHAPE, CAUTION
    return STATE_SHAPES[state], STATE_COLOURS[state]
