"""Notices about slow ranks, stalled ranks and non-finite losses, and the current rates of ranks.

The launcher explains slow steps in a ``Note`` of kind ``"slow"`` (``launcher/slow_watch.py``). If there is no
explanation, the notice names the ranks that are slower than the others.

A rank is stalled if it has been training, evaluating or waiting without any change (including output) for 20 s or for
as long as 20 of its steps usually take, whichever is longer. It is also stalled if the launcher emits ``Stalled`` for
it, which happens after half of the hang timeout (``launcher/hang_watch.py``). The launcher's hang report, with stacks,
is a ``Note`` of kind ``"hang"``, shown as a notice of kind ``"stalled"``.

These functions read only the view, which holds the last measurements. :func:`as_of_now` adjusts the rates to account
for the time since then, and :func:`stall_text` describes a rank that is making no progress.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from operator import attrgetter
from statistics import median, median_low

from nblaunch import formatting
from nblaunch.dashboard.rates import WINDOW_S, RatePoint
from nblaunch.dashboard.view import JobView, RankView, replace
from nblaunch.events import WorkerState
from nblaunch.formatting import rate, whole_duration


@dataclass(frozen=True)
class Notice:
    """One notice.

    Args:
        kind: ``"slow"``, ``"stalled"`` or ``"loss"``.
        ranks: the affected ranks.
        text: one sentence.
        lines: details, one per line.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class JobStall:
    """A job in which no rank is making progress.

    Args:
        text: a sentence that says where the job is stuck, and for how long.
        is_certain: whether no rank can continue on its own; False if a rank may be working without taking steps.
        advice: what to do; empty if the job may still continue.
    """

    text: str
    is_certain: bool
    advice: str


def notices(view: JobView) -> tuple[Notice, ...]:
    """Return the current notices, the most urgent first."""
    stalled = _stalled(view)
    slow = [] if stalled else _explained(view, _slow_ranks(view) or _slow_in_step(view))
    return (*stalled, *_non_finite_losses(view), *slow)


def _explained(view: JobView, compared: list[Notice]) -> list[Notice]:
    """Return the notice about slow steps: the launcher's explanation, or else the comparison of ranks."""
    ranks = compared[0].ranks if compared else ()
    return [Notice("slow", ranks, view.slow)] if view.slow else compared


# --- slow ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Claim:
    """A threshold: how much slower a rank must be, and for how long, before a notice reports it.

    A busy machine delays ranks at random, so a small difference must last longer than a large one before it is
    reported.

    Args:
        ratio: duration of a step, as a multiple of the usual duration.
        span_s: length of the measurement, in seconds.
        num_parts: number of parts of the span; the rank must be this slow in each of them.
    """

    ratio: float
    span_s: float
    num_parts: int


SLOW_RATIO = 1.3
"""A rank is slow if its step takes this many times as long as the usual one."""

_CLAIMS = (_Claim(SLOW_RATIO, WINDOW_S - 1.0, 8), _Claim(3.0, 3.0, 3))
_MIN_STEPS = 3  # needed to compare rates

_MIN_LOSS = 0.1
"""A notice appears if the other ranks lose at least this fraction of a step by waiting for the slow ranks."""


def _slow_ranks(view: JobView) -> list[Notice]:
    """Find ranks whose step rate is far below the rate of the others."""
    step_s, slower = _slower_for_long(view, attrgetter("time_s", "steps"))
    if not slower:
        return []
    own_s, usual_s = _own_and_usual(step_s, slower)
    text = f"{_are_slower(slower)} ({rate(1 / own_s)} vs. {rate(1 / usual_s)} steps/s)"
    return [Notice("slow", tuple(slower), text)]


def _slow_in_step(view: JobView) -> list[Notice]:
    """Find ranks that make the others wait at every step, as in data parallel training, where all rates are equal."""
    busy_s, slower = _slower_for_long(view, attrgetter("busy_time_s", "busy_steps"))
    if not slower:
        return []
    own_s, usual_s = _own_and_usual(busy_s, slower)
    steps_per_s = median(view.ranks[rank].steps_per_s or 1.0 for rank in slower)
    if (own_s - usual_s) * steps_per_s < _MIN_LOSS:
        return []
    text = (
        f"{_are_slower(slower)} ({own_s * 1000:,.0f} vs. {usual_s * 1000:,.0f} ms per step without waits), "
        "which slows down all ranks"
    )
    return [Notice("slow", tuple(slower), text)]


def _slower_for_long(
    view: JobView, measure: Callable[[RatePoint], tuple[float, int]]
) -> tuple[dict[int, float], dict[int, float]]:
    """Return each rank's seconds per step, and how many times slower the slow ranks are, for the first of ``_CLAIMS``
    that holds.

    Args:
        view: view of the job.
        measure: returns the seconds and steps counted up to a point.
    """
    for claim in _CLAIMS:
        spans = {
            rank.rank: _last_points(rank, claim.span_s) for rank in view.ranks if _is_measured(view, rank)
        }
        spans = {rank: points for rank, points in spans.items() if points}
        whole = _step_seconds({rank: (points[0], points[-1]) for rank, points in spans.items()}, measure)
        slower = _slower(whole, claim.ratio)
        for part in range(claim.num_parts if slower else 0):
            ends = {rank: _ends_of_part(points, part, claim.num_parts) for rank, points in spans.items()}
            slower_now = _slower(_step_seconds(ends, measure), claim.ratio)
            slower = {rank: times for rank, times in slower.items() if rank in slower_now}
        if slower:
            return whole, slower
    return {}, {}


def _last_points(rank: RankView, span_s: float) -> tuple[RatePoint, ...]:
    """Return the latest points that cover the span and enough steps; no points if there are too few."""
    points = rank.rate_points
    if len(points) < _MIN_STEPS:
        return ()
    newest = points[-1]
    first = bisect_right(points, newest.time_s - span_s, key=attrgetter("time_s")) - 1
    first = min(first, len(points) - _MIN_STEPS)
    while first >= 0 and newest.steps - points[first].steps < _MIN_STEPS:
        first -= 1
    return points[first:] if first >= 0 else ()


def _ends_of_part(points: Sequence[RatePoint], part: int, num_parts: int) -> tuple[RatePoint, RatePoint]:
    """Return the first and last points of a part. Parts have at least one step, and overlap if there are few steps."""
    last = len(points) - 1
    first = min(part * last // num_parts, last - 1)
    return points[first], points[max((part + 1) * last // num_parts, first + 1)]


def _step_seconds(
    ends: Mapping[int, tuple[RatePoint, RatePoint]], measure: Callable[[RatePoint], tuple[float, int]]
) -> dict[int, float]:
    """Return the seconds per step between two points, by rank, for the ranks that took steps between them."""
    seconds = {}
    for rank, (first, last) in ends.items():
        (from_s, from_step), (to_s, to_step) = measure(first), measure(last)
        if to_step > from_step and to_s > from_s:
            seconds[rank] = (to_s - from_s) / (to_step - from_step)
    return seconds


def _slower(seconds: Mapping[int, float], ratio: float) -> dict[int, float]:
    """Return how many times slower the slow ranks are, by rank; empty if more than half of the ranks are slow."""
    usual_s = median_low(seconds.values()) if len(seconds) > 1 else 0.0
    slower = {
        rank: own_s / usual_s for rank, own_s in sorted(seconds.items()) if own_s >= ratio * usual_s > 0
    }
    return slower if len(slower) <= len(seconds) // 2 else {}


def _own_and_usual(seconds: Mapping[int, float], slower: Mapping[int, float]) -> tuple[float, float]:
    """Return the median duration of a step on the slower ranks, and on the others."""
    others = (own_s for rank, own_s in seconds.items() if rank not in slower)
    return median(seconds[rank] for rank in slower), median(others)


def _are_slower(slower: Mapping[int, float]) -> str:
    """Return ``rank 2: 1.8 times slower than the others``."""
    low, high = f"{min(slower.values()):.1f}", f"{max(slower.values()):.1f}"
    times = low if low == high else f"{low} to {high}"
    return f"{formatting.ranks(slower)}: {times} times slower than the others"


def _is_measured(view: JobView, rank: RankView) -> bool:
    """Return whether the rate of a rank is current."""
    return bool(rank.steps_per_s) and not (rank.state.is_final and not view.is_over)


# --- losses --------------------------------------------------------------------------------------------------------


def _non_finite_losses(view: JobView) -> list[Notice]:
    lost = {rank.rank: rank.loss for rank in view.ranks if rank.loss is not None and not isfinite(rank.loss)}
    if not lost:
        return []
    text = f"the loss on {formatting.ranks(lost)} is {next(iter(lost.values()))}"
    return [Notice("loss", tuple(lost), text)]


# --- stalled ---------------------------------------------------------------------------------------------------------

STALLED_S = 20.0
"""Seconds without a step, output or change of state after which a rank has stalled; more if its steps are long."""

_STALLED_STEPS = 20  # a rank is stalled if nothing has changed for as long as this many steps usually take
_STEPPING = {WorkerState.TRAINING, WorkerState.EVALUATING, WorkerState.WAITING}
_BRIEF_S = 1.0  # a wait in a collective at every step is normal


def _stalled(view: JobView) -> list[Notice]:
    """Find ranks that have not changed for a long time; waiting ranks count only if no other rank has stalled."""
    if view.is_over:
        # If a hang stopped the job, the exception contains the positions. A job that succeeded got past the hang,
        # unless ranks were killed while they were sending their weights.
        codes = {rank.exit_status.code for rank in view.ranks if rank.exit_status is not None}
        is_overcome = view.outcome == "done" and codes <= {0}
        is_shown = view.hang and not view.end.has_hung and not is_overcome
        return [Notice("stalled", (), view.hang[0], view.hang[1:])] if is_shown else []
    live = [rank for rank in view.ranks if not rank.state.is_final]
    stalls = {rank.rank: rank.stall for rank in live if rank.stall is not None}
    if view.hang and stalls:
        text = view.hang[0]
        if all(stall.is_certain for stall in stalls.values()):
            # The report's first line gives the duration at the time of the report. Replace it with the current one.
            since_s = max(stall.time_s - stall.for_s for stall in stalls.values())
            text = f"no progress for {whole_duration(view.now_s - since_s)}:"
        return [Notice("stalled", tuple(stalls), text, view.hang[1:])]
    still = [rank for rank in live if is_stalled(view, rank)]
    named = [rank for rank in still if not _is_waiting(rank)]
    if not named and len(still) == len(live):
        named = still
    if not named:
        return []
    ranks = tuple(rank.rank for rank in named)
    for_s = view.now_s - max(rank.changed_s for rank in named)
    return [Notice("stalled", ranks, f"{formatting.ranks(ranks)}: no progress for {whole_duration(for_s)}")]


def job_stall(view: JobView) -> JobStall | None:
    """Return a sentence that says where a job is stuck; None while a rank is making progress.

    It also reports a rank that is waiting in a collective for a rank that is still working, although this is not yet a
    stall.
    """
    live = [] if view.is_over else [rank for rank in view.ranks if not rank.state.is_final]
    waiting = [rank for rank in live if rank.stall is not None and rank.stall.waiting_in]
    others = [rank for rank in live if rank not in waiting]
    still = [rank for rank in others if is_stalled(view, rank)]
    if not waiting and len(still) < len(live):
        return None
    if not live:
        return None
    is_certain = bool(waiting) and len(still) == len(others)
    for_s = whole_duration(view.now_s - max(_still_since(rank) for rank in (*waiting, *still)))
    status = f"{'stuck' if is_certain else 'waiting' if waiting else 'no progress'} for {for_s}"
    text = f"{status}: {_whereabouts(waiting, others)}".removesuffix(": ")
    return JobStall(text, is_certain, "" if waiting and not is_certain else _next_step(others))


def _still_since(rank: RankView) -> float:
    return rank.changed_s if rank.stall is None else rank.stall.time_s - rank.stall.for_s


def _whereabouts(waiting: Sequence[RankView], others: Sequence[RankView]) -> str:
    """Return ``rank 1 has not entered all_reduce, cell 5, line 14``, or where all ranks are."""
    calls: dict[str, list[int]] = {}
    for rank in waiting:
        assert rank.stall is not None
        place = f"{rank.stall.waiting_in}, {rank.stall.where}" if rank.stall.where else rank.stall.waiting_in
        calls.setdefault(place, []).append(rank.rank)
    if len(calls) == 1 and others:
        (place,) = calls
        have = "has" if len(others) == 1 else "have"
        return f"{formatting.ranks(rank.rank for rank in others)} {have} not entered {place}"
    parts = [f"{formatting.ranks(ranks)} in {place}" for place, ranks in calls.items()]
    places: dict[str, list[int]] = {}
    for rank in others:
        if rank.stall is not None and rank.stall.where:
            places.setdefault(rank.stall.where, []).append(rank.rank)
    parts += [f"{formatting.ranks(ranks)} at {place}" for place, ranks in places.items()]
    return "; ".join(parts[:_NUM_PLACES]) + ("; ..." if len(parts) > _NUM_PLACES else "")


def _next_step(others: Sequence[RankView]) -> str:
    """Return what to do about a stall."""
    places = [rank for rank in others if rank.stall is not None and rank.stall.where]
    look = ""
    if places and places[0].stall is not None:
        look = f"Check what rank {places[0].rank} is doing in {places[0].stall.where}. "
    return f"{look}Interrupt the cell to end the job; on_hang='stop' ends such jobs automatically."


_NUM_PLACES = 3


def _is_waiting(rank: RankView) -> bool:
    return rank.state is WorkerState.WAITING or bool(rank.stall and rank.stall.waiting_in)


def is_stalled(view: JobView, rank: RankView) -> bool:
    """Return whether a rank has made no progress for a long time, according to the launcher or the clock."""
    if rank.state.is_final:
        return False
    if rank.stall is not None and rank.stall.is_certain:
        return True
    limit_s = max(STALLED_S, _STALLED_STEPS / rank.steps_per_s if rank.steps_per_s else 0.0)
    return rank.state in _STEPPING and view.now_s - rank.changed_s >= limit_s


def stall_text(view: JobView, rank: RankView) -> str:
    """Return ``waiting in all_reduce (cell 5, line 14)``, ``no progress for 12 s``, or "" if the rank is making
    progress.
    """
    stall = rank.stall
    if stall is not None and stall.waiting_in and not rank.state.is_final:
        return f"waiting in {stall.waiting_in} ({stall.where})"
    if not is_stalled(view, rank) or rank.state is WorkerState.WAITING:
        return ""
    since_s = rank.changed_s if stall is None else stall.time_s - stall.for_s
    where = f" ({stall.where})" if stall is not None else ""
    return f"no progress for {whole_duration(view.now_s - since_s)}{where}"


def settled_state(view: JobView, rank: RankView) -> WorkerState:
    """Return the state of a rank, ignoring the brief waits in the collectives of each step."""
    if rank.state is not WorkerState.WAITING:
        return rank.state
    since_s = max(rank.state_s, rank.stepped_s)
    is_brief = not (rank.stall and rank.stall.waiting_in) and view.now_s - since_s < _BRIEF_S
    return rank.phase if is_brief else rank.state


# --- current rates ---------------------------------------------------------------------------------------------------

_KEPT_S, _KEPT_STEPS = 4.0, 6  # how long a rate is shown without new steps, in seconds and in steps


def as_of_now(view: JobView) -> JobView:
    """Return the view with current rates: 0 if a rank has stopped taking steps."""
    if not any(_has_stopped(view, rank) for rank in view.ranks):
        return view
    return replace(
        view, ranks=tuple(_at_rest(rank) if _has_stopped(view, rank) else rank for rank in view.ranks)
    )


def _has_stopped(view: JobView, rank: RankView) -> bool:
    if not rank.steps_per_s or rank.state in (WorkerState.DONE, WorkerState.FINISHING):
        return False
    return view.now_s - rank.stepped_s >= max(_KEPT_S, _KEPT_STEPS / rank.steps_per_s)


def _at_rest(rank: RankView) -> RankView:
    return replace(rank, steps_per_s=0.0, samples_per_s=None if rank.samples_per_s is None else 0.0)
