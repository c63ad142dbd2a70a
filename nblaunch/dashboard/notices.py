"""Notices about slow and stalled ranks and losses that are not finite; rates as they are now. From the view alone.

A stalled rank is one without any change for 20 s, output included. Hangs are another matter: the launcher finds them by
other rules (``diagnosis/hang.py``), and reports them with stacks in a ``Note`` event of kind ``"hang"``.

A view has what was measured last. What is true now follows from the time since: :func:`as_of_now` returns the view with
the rates of the moment, and :func:`stall_text` what a rank does that makes no progress.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median

from nblaunch import formatting
from nblaunch.dashboard.view import JobView, RankView, replace
from nblaunch.events import WorkerState
from nblaunch.formatting import percent, rate, whole_duration

SLOW_RATIO = 1.3
"""A rank is slow if its step takes this many times as long as those of the others."""

_MIN_SPAN_S = 3.0  # seconds of measurement before a rate is compared
_LARGE_RATIO, _LARGE_BYTES = 1.5, 1_000_000_000
_MIN_LOSS = 0.1  # fraction of a step that the other ranks lose by waiting for the slowest
_MIN_WAITING = 0.25  # fraction of the time
_MIN_WAITS = 3  # a single long wait, as for a download, does not mean that a rank is slow


@dataclass(frozen=True)
class Notice:
    """One notice.

    Args:
        kind: ``"slow"``, ``"stalled"``, ``"memory"`` or ``"loss"``.
        ranks: the ranks concerned.
        text: one sentence.
        lines: details, a line each.
    """

    kind: str
    ranks: tuple[int, ...]
    text: str
    lines: tuple[str, ...] = ()


def notices(view: JobView) -> tuple[Notice, ...]:
    """Return the notices of the moment, the most urgent first."""
    stalled = _stalled(view)
    slow = [] if stalled else _slow_ranks(view) or _slow_in_step(view) or _awaited_rank(view)
    return (*stalled, *_non_finite_losses(view), *_large_ranks(view), *slow)


# --- slow ----------------------------------------------------------------------------------------------------------


def _slow_ranks(view: JobView) -> list[Notice]:
    """Find ranks whose step rate is far below that of the others."""
    rates = {
        rank.rank: rank.steps_per_s for rank in view.ranks if rank.steps_per_s and _is_measured(view, rank)
    }
    slower = _outliers({rank: 1 / per_s for rank, per_s in rates.items()}, SLOW_RATIO)
    if not slower:
        return []
    text = (
        f"{_are_slower(view, slower, rates)} ({rate(median(rates[rank] for rank in slower))} against "
        f"{rate(median(per_s for rank, per_s in rates.items() if rank not in slower))} steps/s)"
    )
    return [Notice("slow", tuple(sorted(slower)), text)]


def _slow_in_step(view: JobView) -> list[Notice]:
    """Find ranks that make the others wait at every step, as in data parallel training, where all rates are equal."""
    busy_s = {
        rank.rank: rank.busy_step_s for rank in view.ranks if rank.busy_step_s and _is_measured(view, rank)
    }
    slower = _outliers(busy_s, SLOW_RATIO)
    if not slower:
        return []
    longest = median(busy_s[rank] for rank in slower)
    usual = median(seconds for rank, seconds in busy_s.items() if rank not in slower)
    steps_per_s = median(view.ranks[rank].steps_per_s or 1.0 for rank in slower)
    if (longest - usual) * steps_per_s < _MIN_LOSS:
        return []
    text = (
        f"{_are_slower(view, slower, busy_s)} in {'its' if len(slower) == 1 else 'their'} own part of a step "
        f"({longest * 1000:,.0f} against {usual * 1000:,.0f} ms), which slows down all ranks"
    )
    return [Notice("slow", tuple(sorted(slower)), text)]


def _outliers(seconds: Mapping[int, float], ratio: float) -> dict[int, float]:
    """Return ranks far above the median of the others -> the ratio; empty if that are more than half of them."""
    ordered = sorted(seconds.values())
    slower: dict[int, float] = {}
    for rank, own_s in seconds.items() if len(ordered) > 1 else ():
        times = own_s / _median_without(ordered, bisect_left(ordered, own_s))
        if times >= ratio:
            slower[rank] = times
    return slower if len(slower) <= len(seconds) // 2 else {}


def _median_without(ordered: Sequence[float], left_out: int) -> float:
    """Return the median of sorted numbers without the one at an index."""
    middle = (len(ordered) - 1) // 2
    high = ordered[middle + (left_out <= middle)]
    if len(ordered) % 2 == 0:  # an odd number is left
        return high
    return (ordered[middle - 1 + (left_out <= middle - 1)] + high) / 2


def _are_slower(view: JobView, slower: Mapping[int, float], measured: Iterable[int]) -> str:
    """Return ``rank 2 is 1.8 times slower than the others``."""
    low, high = f"{min(slower.values()):.1f}", f"{max(slower.values()):.1f}"
    times = low if low == high else f"{low} to {high}"
    verb = ("was" if view.is_over else "is") if len(slower) == 1 else ("were" if view.is_over else "are")
    others = [rank for rank in measured if rank not in slower]
    compared = formatting.ranks(others) if len(others) == 1 else "the others"
    return f"{formatting.ranks(slower)} {verb} {times} times slower than {compared}"


def _is_measured(view: JobView, rank: RankView) -> bool:
    """Return whether the rate is current and covers enough steps to be compared."""
    if not rank.steps_per_s or len(rank.rate_points) < 2 or (rank.state.is_final and not view.is_over):
        return False
    first, last = rank.rate_points[0], rank.rate_points[-1]
    return last.time_s - first.time_s >= _MIN_SPAN_S and last.steps - first.steps >= 3


def waiting_share(view: JobView, rank: RankView) -> float:
    """Return the fraction of the job's time that ``rank`` has waited in collectives of nblaunch, 0 to 1."""
    waited_s = rank.waited_s
    if rank.state is WorkerState.WAITING and rank.state_s:
        waited_s += max(view.now_s - rank.state_s, 0.0)
    return min(waited_s / view.elapsed_s, 1.0) if view.elapsed_s > 0 else 0.0


def _awaited_rank(view: JobView) -> list[Notice]:
    """Find the rank that never waits while all others do. Ranks that synchronize at every step have equal rates."""
    if view.elapsed_s < _MIN_SPAN_S or len(view.ranks) < 2 or view.outcome not in ("", "done"):
        return []
    shares = {rank.rank: waiting_share(view, rank) for rank in view.ranks}
    awaited = min(shares, key=lambda rank: shares[rank])
    others = [share for rank, share in shares.items() if rank != awaited]
    if any(rank.num_waits < _MIN_WAITS for rank in view.ranks if rank.rank != awaited):
        return []
    if min(others) < _MIN_WAITING or shares[awaited] > min(others) / 4:
        return []
    verb = "waited" if view.is_over else ("wait" if len(others) > 1 else "waits")
    waiting = (
        "the others" if len(others) > 1 else formatting.ranks([rank for rank in shares if rank != awaited])
    )
    text = f"{waiting} {verb} for rank {awaited} {percent(median(others))} of the time"
    return [Notice("slow", (awaited,), text)]


# --- stalled ---------------------------------------------------------------------------------------------------------


def _stalled(view: JobView) -> list[Notice]:
    """Find ranks without any change for long, and the ranks that wait for them."""
    if view.is_over:
        # The exception of a job that was stopped for a hang has the positions. A job that is done has overcome it,
        # unless ranks were killed while they sent their weights.
        codes = {rank.exit_status.code for rank in view.ranks if rank.exit_status is not None}
        is_overcome = view.outcome == "done" and codes <= {0}
        is_shown = view.hang and not view.end.has_hung and not is_overcome
        return [Notice("stalled", (), view.hang[0], view.hang[1:])] if is_shown else []
    live = [rank for rank in view.ranks if not rank.state.is_final]
    found = {rank.rank: rank.stall for rank in live if rank.stall is not None}
    if view.hang and found:
        text = view.hang[0]
        if all(stall.is_certain for stall in found.values()):
            # The report has the time at which it was made.
            since_s = max(stall.time_s - stall.for_s for stall in found.values())
            text = f"no progress for {whole_duration(view.now_s - since_s)}:"
        return [Notice("stalled", tuple(found), text, view.hang[1:])]
    still = [rank for rank in live if is_stalled(view, rank)]
    stalled = [rank for rank in still if not _is_waiting(rank)]
    if not still or (not stalled and len(still) < len(live)):
        return []  # those that wait do so for ranks that make progress
    named = stalled or still
    for_s = whole_duration(view.now_s - max(rank.changed_s for rank in named))
    text = f"{_names(named)}: no progress for {for_s}"
    if not stalled:
        text += ", waiting for each other in a collective"
    return [Notice("stalled", tuple(rank.rank for rank in named), text)]


def _is_waiting(rank: RankView) -> bool:
    return rank.state is WorkerState.WAITING or bool(rank.stall and rank.stall.waiting_in)


def _names(ranks: Sequence[RankView]) -> str:
    return formatting.ranks([rank.rank for rank in ranks])


# --- losses --------------------------------------------------------------------------------------------------------


def _non_finite_losses(view: JobView) -> list[Notice]:
    lost = [rank for rank in view.ranks if rank.loss is not None and not isfinite(rank.loss)]
    if not lost:
        return []
    verb = "was" if view.is_over else "is"
    text = f"the loss of {_names(lost)} {verb} {lost[0].loss}"
    return [Notice("loss", tuple(rank.rank for rank in lost), text)]


# --- memory --------------------------------------------------------------------------------------------------------


def _large_ranks(view: JobView) -> list[Notice]:
    """Find ranks that hold far more memory than the others, of their devices or of the host."""
    device = {rank.rank: float(rank.device_bytes) for rank in view.ranks if rank.device_bytes}
    host = {rank.rank: float(rank.host_bytes) for rank in view.ranks if rank.host_bytes}
    return [] if view.is_over else _larger("device", device) or _larger("host", host)


def _larger(where: str, sizes: Mapping[int, float]) -> list[Notice]:
    found = _outliers(sizes, _LARGE_RATIO) if len(sizes) > 2 else {}
    if not found:
        return []
    usual = median(num_bytes for rank, num_bytes in sizes.items() if rank not in found)
    large = {rank: times for rank, times in found.items() if sizes[rank] - usual >= _LARGE_BYTES}
    if not large:
        return []
    verb = "holds" if len(large) == 1 else "hold"
    most = formatting.size_range([int(sizes[rank]) for rank in large])
    text = f"{formatting.ranks(large)} {verb} {most} of {where} memory, the others {formatting.size(usual)}"
    return [Notice("memory", tuple(sorted(large)), text)]


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
    if rank.state in _QUIET or not rank.changed_s:
        return False
    limit_s = max(STALLED_S, _STALLED_STEPS / rank.steps_per_s if rank.steps_per_s else 0.0)
    if rank.state is WorkerState.RUNNING:
        limit_s *= _OUTSIDE_FACTOR
    elif view.start.hang_timeout_s is not None:
        limit_s = min(limit_s, view.start.hang_timeout_s)
    return view.now_s - rank.changed_s >= limit_s


def stall_text(view: JobView, rank: RankView) -> str:
    """Return ``waiting in all_reduce (cell 5, line 14)`` or ``no progress for 12 s``; empty for a rank that moves."""
    stall = rank.stall
    if stall is not None and stall.waiting_in and not rank.state.is_final:
        return f"waiting in {stall.waiting_in} ({stall.where})"
    if not is_stalled(view, rank) or rank.state is WorkerState.WAITING:
        return ""
    since_s = rank.changed_s if stall is None else stall.time_s - stall.for_s
    where = f" ({stall.where})" if stall is not None else ""
    return f"no progress for {whole_duration(view.now_s - since_s)}{where}"


def settled_state(view: JobView, rank: RankView) -> WorkerState:
    """Return the state of a rank, without the brief waits in the collectives of each step."""
    if rank.state is not WorkerState.WAITING:
        return rank.state
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
