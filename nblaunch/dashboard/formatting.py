"""How times, rates, losses and foreign text are written in a dashboard, the same in every renderer, and state colours.

Each colour is legible on white and on near-black, and none ever stands without its word.
"""

from __future__ import annotations

import re
from math import isfinite

from nblaunch.events import WorkerState

LIVE, GOOD, BAD, CALM = "#3b82d6", "#2f9e6e", "#d64545", "#8a8f98"
CAUTION = "#b97c12"

OF_STATE = {
    WorkerState.STARTING: CALM,
    WorkerState.RUNNING: LIVE,
    WorkerState.TRAINING: LIVE,
    WorkerState.EVALUATING: "#8b6fd6",
    WorkerState.WAITING: CAUTION,
    WorkerState.COMPILING: "#8b6fd6",
    WorkerState.FINISHING: GOOD,
    WorkerState.DONE: GOOD,
    WorkerState.FAILED: BAD,
    WorkerState.STOPPED: CALM,
}


def of_outcome(outcome: str) -> str:
    """The colour of a job: ``outcome`` as in :class:`nblaunch.events.JobFinished`, empty while it runs."""
    return {"": LIVE, "done": GOOD, "failed": BAD}.get(outcome, CALM)


_LINE_LENGTH = 400  # characters of foreign text at most
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-_])")
_BREAKS = re.compile(r"[\n\v\f\r\x85\u2028\u2029]+")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def duration(seconds: float) -> str:
    """``0.03 s``, ``1.2 s``, ``12 s``, ``3:07``, ``1:02:03``."""
    if not isfinite(seconds) or seconds > 1e8:
        return "?"
    if seconds < 0.995:
        return f"{seconds:.2f} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def whole_duration(seconds: float) -> str:
    """The same in whole seconds, for times that are read while they change: ``0 s``, ``12 s``, ``3:07``."""
    return f"{seconds:.0f} s" if seconds < 9.5 else duration(seconds)


def rate(per_s: float) -> str:
    """About three digits: ``0.083``, ``3.21``, ``38.2``, ``1,240``."""
    if per_s >= 99.95:
        return f"{per_s:,.0f}"
    return f"{per_s:.1f}" if per_s >= 9.995 else f"{per_s:.2f}" if per_s >= 0.995 else f"{per_s:.3f}"


def loss(value: float) -> str:
    """Four digits where a loss usually lies, so that numbers stay aligned: ``0.5321``, ``12.04``, ``3.1e-05``."""
    if not isfinite(value):
        return str(value)
    size = abs(value)
    if size != 0 and (size < 1e-3 or size >= 1e5):
        return f"{value:.1e}"
    return f"{value:.4f}" if size < 10 else f"{value:.2f}" if size < 1000 else f"{value:.0f}"


def percent(fraction: float) -> str:
    """``0%``, ``45%``, ``100%``; 100 only where all is done."""
    return f"{min(int(100 * fraction), 100)}%"


def clean(text: str) -> str:
    """``text`` as one line on paper: without escape sequences, control characters and breaks, and not too long."""
    if not text.isprintable():
        text = _BREAKS.sub(" ", _ANSI.sub("", text)).expandtabs(4)
        text = _CONTROL.sub("", text).encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= _LINE_LENGTH else text[: _LINE_LENGTH - 1] + "…"
