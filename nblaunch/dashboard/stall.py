"""Ranks without progress, as they are shown: which they are, where they are, and rates that fall to 0.

A view has what was measured last. What is true now follows from the time since: :func:`as_of_now` returns the view with
the rates of the moment, and :func:`stall_text` what a rank does that makes no progress.
"""

from __future__ import annotations

from nblaunch.dashboard.view import JobView, RankView, replace
from nblaunch.events import WorkerState
from nblaunch.formatting import whole_duration

STALLED_S = 20.0
"""Seconds without steps, changes of state or output after which a rank is stalled; more if its steps take long."""

_STALLED_STEPS = 20  # a rank is stalled after the time of this many of its usual steps
_OUTSIDE_FACTOR = 3  # outside of loaders the usual duration is unknown
_QUIET = {WorkerState.STARTING, WorkerState.COMPILING, WorkerState.FINISHING}
_BRIEF_S = 1.0  # a wait in a collective at every step is no news
_KEPT_S, _KEPT_STEPS = 2.0, 3  # a measured rate holds for so long, or for so many of its steps


def is_stalled(view: JobView, rank: RankView) -> bool:
    """Return whether a rank has made no progress for long, by the launcher or by the clock."""
    if rank.state.is_final:
        return False
    if rank.stall is not None and rank.stall.is_certain:
        return True
    if rank.state in _QUIET or not rank.moved_s:
        return False
    limit_s = max(STALLED_S, _STALLED_STEPS / rank.steps_per_s if rank.steps_per_s else 0.0)
    if rank.state is WorkerState.RUNNING:
        limit_s *= _OUTSIDE_FACTOR
    elif view.hang_timeout_s is not None:
        limit_s = min(limit_s, view.hang_timeout_s)
    return view.now_s - rank.moved_s >= limit_s


def stall_text(view: JobView, rank: RankView) -> str:
    """Return ``waiting in all_reduce (cell 5, line 14)`` or ``no progress for 12 s``; empty for a rank that moves."""
    stall = rank.stall
    if stall is not None and stall.waiting_in and not rank.state.is_final:
        return f"waiting in {stall.waiting_in} ({stall.where})"
    if not is_stalled(view, rank) or rank.state is WorkerState.WAITING:
        return ""
    since_s = rank.moved_s if stall is None else stall.time_s - stall.for_s
    where = f" ({stall.where})" if stall is not None else ""
    return f"no progress for {whole_duration(view.now_s - since_s)}{where}"


def settled_state(view: JobView, rank: RankView) -> WorkerState:
    """Return the state of a rank, without the brief waits in the collectives of each step."""
    if rank.state is not WorkerState.WAITING:
        return WorkerState.WAITING if stall_text(view, rank) else rank.state
    since_s = max(rank.state_s, rank.stepped_s)
    is_brief = not (rank.stall and rank.stall.waiting_in) and view.now_s - since_s < _BRIEF_S
    return rank.phase if is_brief else rank.state


def as_of_now(view: JobView) -> JobView:
    """Return the view with the rates of this moment: those of ranks that take no steps fall to 0."""
    if not any(_share(view, rank) < 1 for rank in view.ranks):
        return view
    return replace(view, ranks=tuple(_slowed(rank, _share(view, rank)) for rank in view.ranks))


def _share(view: JobView, rank: RankView) -> float:
    """Return which part of its rate a rank still has, 0 to 1."""
    if not rank.steps_per_s or rank.state in (WorkerState.DONE, WorkerState.FINISHING):
        return 1.0
    kept_s = max(_KEPT_S, _KEPT_STEPS / rank.steps_per_s)
    return min(max(2 - (view.now_s - rank.stepped_s) / kept_s, 0.0), 1.0)


def _slowed(rank: RankView, share: float) -> RankView:
    if share == 1 or rank.steps_per_s is None:
        return rank
    samples_per_s = None if rank.samples_per_s is None else rank.samples_per_s * share
    return replace(rank, steps_per_s=rank.steps_per_s * share, samples_per_s=samples_per_s)
