"""What a view becomes by an event: the starts and ends of ranks, their output, what they log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from math import isfinite
from typing import Any

from nblaunch import events
from nblaunch.dashboard.bars import read_bar
from nblaunch.dashboard.curves import Curve
from nblaunch.dashboard.view import CHART_LENGTH, TAIL_LENGTH, JobView, RankView
from nblaunch.dashboard.wording import clean
from nblaunch.events import Event, WorkerState

_NUM_NOTES = 20
_NUM_CURVES = 12  # logged metrics that are kept for charts
_STOP_SIGNALS = {-2, -9, -15}  # what the launcher sends to workers that it stops: SIGINT, SIGKILL, SIGTERM


def fold(view: JobView, event: Event) -> JobView:
    """The view after ``event``. Events of unknown types or ranks leave it as it is."""
    on_job = _JOB_FOLDS.get(type(event))
    if on_job is not None:
        return on_job(view, event)
    on_rank = _RANK_FOLDS.get(type(event))
    if on_rank is None or not 0 <= event.rank < len(view.ranks):
        return view
    return _with_rank(view, on_rank(view, view.ranks[event.rank], event))


def _with_rank(view: JobView, rank: RankView) -> JobView:
    return replace(view, ranks=(*view.ranks[: rank.rank], rank, *view.ranks[rank.rank + 1 :]))


def _job_started(view: JobView, event: events.JobStarted) -> JobView:
    return replace(
        view,
        function_name=clean(event.function_name),
        num_processes=event.num_processes,
        backend=event.backend,
        start_method=event.start_method,
        reason=event.reason,
        detour=clean(event.detour),
        spans_devices=event.spans_devices,
        mixed_precision="" if event.mixed_precision == "no" else clean(event.mixed_precision),
        log_dir=event.log_dir,
        attempt=event.attempt,
        # A restart is the same job to the person who waits for it.
        started_s=view.started_s if event.attempt and view.started_s else event.time_s,
        now_s=event.time_s,
        outcome="",
        failed_rank=None,
        message="",
        hang=(),
        facts={},
        host_bytes=None,
        ranks=tuple(RankView(rank) for rank in range(event.num_processes)),
    )


def _job_finished(view: JobView, event: events.JobFinished) -> JobView:
    view = replace(
        view,
        outcome=event.outcome,
        is_early=event.is_early,
        failed_rank=event.failed_rank,
        message=event.message,
        now_s=max(event.time_s, view.started_s),
    )
    return replace(view, ranks=tuple(_as_trained(_settle(view, rank)) for rank in view.ranks))


def _as_trained(rank: RankView) -> RankView:
    """A rank that is done tells how it trained, not how the evaluation after that went by."""
    if rank.state is not WorkerState.DONE or rank.trained is None:
        return rank
    return replace(rank, **{part.name: getattr(rank.trained, part.name) for part in fields(rank.trained)})


def _settle(view: JobView, rank: RankView) -> RankView:
    """A rank's last state, now that the outcome is known: what was stopped did not fail, and what failed is said."""
    if view.outcome == "failed" and rank.rank == view.failed_rank:
        return replace(rank, state=WorkerState.FAILED, failure=rank.failure or _first_line(view.message))
    was_stopped = rank.exit_status is not None and rank.exit_status.code in _STOP_SIGNALS
    if rank.state is WorkerState.FAILED and was_stopped and not rank.is_consequence:
        return replace(rank, state=WorkerState.STOPPED, failure="")
    if rank.state.is_final:
        return rank
    is_done = rank.has_returned or view.outcome == "done"
    return replace(rank.without_line(), state=WorkerState.DONE if is_done else WorkerState.STOPPED)


def _note(view: JobView, event: events.Note) -> JobView:
    if event.kind == "hang":
        return replace(view, hang=tuple(clean(line) for line in event.text.splitlines()))
    note = (event.rank, clean(event.text))
    if event.kind == "warning" and note not in view.warnings:
        view = replace(view, warnings=(*view.warnings, note)[-_NUM_NOTES:])
    return replace(view, notes=(*view.notes, note)[-_NUM_NOTES:])


def _fact(view: JobView, event: events.Fact) -> JobView:
    return replace(view, facts={**view.facts, clean(event.name): clean(event.text)})


def _log_lines(view: JobView, event: events.LogLines) -> JobView:
    if not event.lines or not 0 <= event.rank < len(view.ranks):
        return view
    last = tuple((event.rank, clean(line)) for line in event.lines[-TAIL_LENGTH:])
    rank = view.ranks[event.rank]
    rank = replace(
        rank,
        last_line=last[-1][1],
        num_lines=rank.num_lines + len(event.lines),
        moved_s=max(rank.moved_s, event.time_s),
    )
    return replace(_with_rank(view, rank), tail=(*view.tail, *last)[-TAIL_LENGTH:])


def _displayed(view: JobView, event: events.Displayed) -> JobView:
    text = clean(str(event.data.get("text/plain", ""))) or clean(", ".join(event.data))
    if event.update:
        return view
    return replace(view, tail=(*view.tail, (event.rank, f"displayed: {text}"))[-TAIL_LENGTH:])


def _started(view: JobView, rank: RankView, event: events.Started) -> RankView:
    return replace(rank, pid=event.pid, state=max(rank.state, WorkerState.RUNNING))


def _metric(view: JobView, event: events.Metric) -> JobView:
    if not 0 <= event.rank < len(view.ranks):
        return view
    rank = view.ranks[event.rank]
    rank = replace(rank, metrics={**rank.metrics, **event.values}, metrics_step=event.step)
    return replace(_with_rank(view, rank), curves=_with_points(view.curves, event))


def _with_points(curves: Mapping[str, Curve], event: events.Metric) -> Mapping[str, Curve]:
    """``curves`` with the numbers of ``event``; what is no number, or not finite, can't be drawn."""
    extended = dict(curves)
    for name, value in event.values.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
        if not is_number or (name not in extended and len(extended) >= _NUM_CURVES):
            continue
        curve = extended.get(name, Curve())
        step = curve.num_seen if event.step is None else event.step
        extended[name] = curve.extended(float(step), float(value), CHART_LENGTH)
    return extended


def _host_memory(view: JobView, event: events.HostMemory) -> JobView:
    if not 0 <= event.rank < len(view.ranks) or view.ranks[event.rank].state.is_final:
        return view
    rank = view.ranks[event.rank]
    peak = max(event.num_bytes, rank.host_peak_bytes or 0)
    view = _with_rank(view, replace(rank, host_bytes=event.num_bytes, host_peak_bytes=peak))
    # Of ranks that ended, the memory is free again.
    total = sum(rank.host_bytes or 0 for rank in view.ranks if rank.exit_status is None)
    return replace(
        view,
        host_bytes=total,
        host_peak_bytes=max(total, view.host_peak_bytes or 0),
        is_host_proportional=event.is_proportional,
    )


def _status_line(view: JobView, rank: RankView, event: events.StatusLine) -> RankView:
    line = clean(event.text).strip()
    rank = replace(rank, moved_s=max(rank.moved_s, event.time_s))
    if not line and (rank.bar is not None or rank.is_redrawn):
        return replace(rank, line_gone_s=rank.line_gone_s or event.time_s)
    is_redrawn = rank.status_line != "" and line != ""
    return replace(rank, status_line=line, bar=read_bar(line), is_redrawn=is_redrawn, line_gone_s=0.0)


def _device_use(view: JobView, rank: RankView, event: events.DeviceUse) -> RankView:
    return replace(rank, device_use=event.share)


def _finished(view: JobView, rank: RankView, event: events.Finished) -> RankView:
    state = rank.state if rank.state.is_final else WorkerState.FINISHING
    return replace(rank, state=state, has_returned=True)


def _failed(view: JobView, rank: RankView, event: events.Failed) -> RankView:
    if event.info.type_name.rpartition(".")[2] == "KeyboardInterrupt":
        return replace(rank.without_line(), state=WorkerState.STOPPED)
    return replace(
        rank.without_line(),
        state=WorkerState.FAILED,
        failure=describe_failure(event.info),
        is_consequence=event.is_consequence,
    )


def _exited(view: JobView, rank: RankView, event: events.Exited) -> RankView:
    rank = replace(rank.without_line(), exit_status=event.status)
    if rank.state.is_final:
        return rank
    if rank.has_returned and (event.status.code == 0 or event.status.code in _STOP_SIGNALS):
        # Perhaps ended by the launcher, because a thread lingered.
        return replace(rank, state=WorkerState.DONE)
    others_failed = any(other.state is WorkerState.FAILED for other in view.ranks if other.rank != rank.rank)
    if others_failed and event.status.code in _STOP_SIGNALS:
        return replace(rank, state=WorkerState.STOPPED)
    failure = str(event.status)
    if not rank.has_returned and event.status.code >= 0:
        failure += " before the function returned"
    return replace(rank, state=WorkerState.FAILED, failure=failure)


def describe_failure(info: events.ExceptionInfo) -> str:
    """An exception in one line: type, message, and the last line of the user's own code."""
    line = f"{info.type_name.rpartition('.')[2]}: {_first_line(info.message)}".removesuffix(": ")
    own = [frame for frame in info.frames if frame.is_user]
    if own:
        line += f" (line {own[-1].lineno}: {own[-1].line.strip()})".replace(": )", ")")
    return clean(line)


def _first_line(text: str) -> str:
    return clean(text.strip().partition("\n")[0])


_JOB_FOLDS: dict[type[Event], Callable[[JobView, Any], JobView]] = {
    events.JobStarted: _job_started,
    events.JobFinished: _job_finished,
    events.Note: _note,
    events.Fact: _fact,
    events.LogLines: _log_lines,
    events.Displayed: _displayed,
    events.Metric: _metric,
    events.HostMemory: _host_memory,
}

_RANK_FOLDS: dict[type[Event], Callable[[JobView, RankView, Any], RankView]] = {
    events.Started: _started,
    events.StatusLine: _status_line,
    events.DeviceUse: _device_use,
    events.Finished: _finished,
    events.Failed: _failed,
    events.Exited: _exited,
}
