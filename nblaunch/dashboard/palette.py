"""Colours and shapes of states, for light and dark themes and for terminals.

The colour of running text is unknown and inherited. The colour of coloured text is therefore mixed with the inherited
one, so that the contrast is at least 4.5 to 1 (WCAG 2.2, 1.4.3) on any background on which the theme's own text is
legible. Bars and curves use the pure colour. States with different colours also have different shapes.
"""

from __future__ import annotations

from typing import NamedTuple

from nblaunch.events import WorkerState

LIVE, GOOD, BAD, CALM = "#3b82d6", "#2f9e6e", "#e05656", "#8a8f98"
CAUTION, VIOLET = "#b97c12", "#8b6fd6"
COLOURS = (LIVE, GOOD, BAD, CALM, CAUTION, VIOLET)

INK_PERCENT = 55
"""Share of the named colour in coloured text."""

MUTED = "opacity:.7"
"""Style of less important text. Don't nest it: the inner text would be too faint."""


class Look(NamedTuple):
    """The appearance of a state or an outcome."""

    colour: str
    shape: str
    style: str
    """Colour on terminals, for :func:`paint`."""


STATE_LOOKS = {
    WorkerState.STARTING: Look(CALM, "○", "dim"),
    WorkerState.RUNNING: Look(LIVE, "●", "cyan"),
    WorkerState.TRAINING: Look(LIVE, "●", "cyan"),
    WorkerState.EVALUATING: Look(VIOLET, "◆", "magenta"),
    WorkerState.WAITING: Look(CAUTION, "◐", "yellow"),
    WorkerState.COMPILING: Look(VIOLET, "◇", "magenta"),
    WorkerState.FINISHING: Look(GOOD, "✓", "green"),
    WorkerState.DONE: Look(GOOD, "✓", "green"),
    WorkerState.FAILED: Look(BAD, "✗", "red"),
    WorkerState.STOPPED: Look(CALM, "■", "dim"),
}

_OUTCOME_LOOKS = {
    "": Look(LIVE, "●", "cyan"),
    "done": Look(GOOD, "✓", "green"),
    "failed": Look(BAD, "✗", "red"),
}
_OTHER_OUTCOME = Look(CALM, "■", "yellow")

MARKED_SHAPE = "▲"
"""Shape shown for a running rank that differs from the other ranks."""


def outcome_look(outcome: str) -> Look:
    """Return how to show a job; ``outcome`` is as in :class:`nblaunch.events.JobEnded`, and empty while it runs."""
    return _OUTCOME_LOOKS.get(outcome, _OTHER_OUTCOME)


def ink(colour: str) -> str:
    """Return the CSS style for text in ``colour``; browsers without ``color-mix`` use the colour itself."""
    return f"color:{colour};color:color-mix(in srgb,{colour} {INK_PERCENT}%,currentColor)"


def shape_of(state: WorkerState, *, is_marked: bool = False) -> tuple[str, str]:
    """Return the shape of a state and its colour."""
    if is_marked and not state.is_final:
        return MARKED_SHAPE, CAUTION
    look = STATE_LOOKS[state]
    return look.shape, look.colour


_CODES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36}


def paint(text: str, style: str) -> str:
    """Return ``text`` in the colour ``style``, with escape sequences that all terminals support.

    If ``style`` is empty, the text is unchanged.

    Source: ECMA-48, SGR.
    """
    return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if style and text else text


def unpainted(text: str, style: str) -> str:
    """Return ``text`` unchanged."""
    return text
