"""The colours of states. Each reads on white and on near-black, and none ever stands without its word."""

from __future__ import annotations

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
