"""Pure functions that return the view of a job after an event or a reading of the progress board.

Events report the start, end, output and metrics of ranks. Readings contain steps, samples, times, losses and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from nblaunch import events
from nblaunch.dashboard.rates import RatePoint, is_warming_up, rates_of, warm_up, with_point
from nblaunch.dashboard.view import (
    CHART_LENGTH,
    LINE_STAYS_S,
    NOT_ENDED,
    NUM_EPOCHS,
    Curve,
    EpochView,
    JobView,
    RankView,
    replace,
)
from nblaunch.events import Event, WorkerState
from nblaunch.formatting import first_line, single_line
from nblaunch.wire.board import LARGEST_DRAWN, SlotReading

_PAUSE_S = 2.0  # rates continue after a shorter pause between epochs


def fold_readings(view: JobView, readings: Sequence[SlotReading], now_s: float) -> JobView:
    """Return the view, updated with readings of the board at ``now_s`` (``time.time()``). Cheap if nothing changed.

    The view of a finished job does not change, so its ranks keep showing the numbers from their training rather than
    the last numbers on the board.
    """
    if view.is_over:
        return view
    ranks = list(view.ranks)
    for reading in readings:
        if 0 <= reading.rank < len(ranks) and reading != ranks[reading.rank].reading:
            ranks[reading.rank] = _read(ranks[reading.rank], reading, now_s)
    hang = () if view.hang and _has_moved_on(view.ranks, ranks) else view.hang
    ranks = [rank.without_line() if _has_lost_line(rank, now_s) else rank for rank in ranks]
    return replace(view, ranks=ranks, hang=hang, now_s=max(now_s, view.now_s))


def _has_moved_on(before: Sequence[RankView], ranks: Sequence[RankView]) -> bool:
    """Return whether a rank has taken a step while no rank is known to be stuck.

    Other changes do not count, because ranks that were interrupted in a hang also change.
    """
    has_stepped = any(
        old.stepped_s and new.stepped_s > old.stepped_s for old, new in zip(before, ranks, strict=True)
    )
    return has_stepped and not any(rank.stall for rank in ranks)


def _has_lost_line(rank: RankView, now_s: float) -> bool:
    return rank.line_gone_s > 0 and now_s - rank.line_gone_s >= LINE_STAYS_S


def _read(rank: RankView, reading: SlotReading, now_s: float) -> RankView:
    last = rank.reading
    has_new_state = rank.state_s == 0.0 or reading.state != last.state
    moved = (reading.loop, reading.total, reading.step) != (last.loop, last.total, last.step)
    is_evaluating = _is_evaluating(rank, reading)
    before = _points_before(rank, reading, is_evaluating=is_evaluating)
    points = with_point(before, reading)
    last_rates = rank.steps_per_s, rank.samples_per_s, rank.busy_step_s
    if rank.is_evaluating and not is_evaluating:
        last_rates = rank.trained_rates  # not the rates of the evaluation
    rates = steps_per_s, samples_per_s, busy_step_s = rates_of(points, last_rates)
    # An evaluation inside an epoch hides the progress of the epoch.
    trained_fraction = rank.trained_fraction if rank.is_evaluating else rank.fraction or 0.0
    if rank.warm_up is None and rank.first_epoch and not is_evaluating and not is_warming_up(points):
        warm_job_steps = rank.changed_s, last.job_steps[0]
        rank = replace(rank, warm_up=warm_up(before, points), warm_job_steps=warm_job_steps)
    return replace(
        rank,
        state=_state(rank, reading.state),
        reading=reading,
        steps_per_s=steps_per_s,
        samples_per_s=samples_per_s,
        busy_step_s=busy_step_s,
        trained_rates=rank.trained_rates if is_evaluating else rates,
        trained_fraction=1.0 if _has_trained(reading) else trained_fraction,
        stepped_s=now_s if moved else rank.stepped_s,
        changed_s=now_s,
        stall=rank.stall if rank.stall and replace(reading, interrupts=last.interrupts) == last else None,
        state_s=now_s if has_new_state else rank.state_s,
        phase=rank.phase if reading.state is WorkerState.WAITING else reading.state,
        is_evaluating=is_evaluating,
        **_epoch_times(rank, reading, now_s),
        device_peak_bytes=max(reading.device_bytes, reading.device_peak_bytes) or rank.device_peak_bytes,
        device_limit_bytes=reading.device_limit_bytes or rank.device_limit_bytes,
        rate_points=points,
        trained_span=_trained_span(rank, reading, is_evaluating=is_evaluating),
    )


def _trained_span(rank: RankView, reading: SlotReading, *, is_evaluating: bool) -> tuple[float, int, int]:
    """Return the seconds, steps and samples of training; add those since the last reading, except in an evaluation."""
    last = rank.reading
    if (
        is_evaluating
        or rank.is_evaluating
        or last.step_time_s <= 0
        or reading.step_time_s <= last.step_time_s
    ):
        return rank.trained_span
    span_s, num_steps, num_samples = rank.trained_span
    return (
        span_s + reading.step_time_s - last.step_time_s,
        num_steps + reading.steps_done - last.steps_done,
        num_samples + reading.samples - last.samples,
    )


def _is_evaluating(rank: RankView, reading: SlotReading) -> bool:
    """Return whether the current or last loop on the board is an evaluation."""
    if reading.state is WorkerState.EVALUATING:
        return True
    # A finished evaluation stays on the board until the training loop around it continues.
    is_shown = reading.loop == rank.reading.loop
    if not is_shown and reading.state is not WorkerState.TRAINING and _has_trained(reading):
        # A short evaluation began and ended between two readings.
        return (reading.step, reading.total) != reading.trained[:2]
    return rank.is_evaluating and (is_shown or reading.state is not WorkerState.TRAINING)


def _epoch_times(rank: RankView, reading: SlotReading, now_s: float) -> dict[str, Any]:
    """Return the changed fields that describe the length of an epoch."""
    if not reading.epoch:
        return {}
    # A second training run has a new loop. After a loop that reads only one batch, by contrast, the board returns to
    # the previous loop.
    is_another = reading.epoch < rank.epoch and reading.loop > rank.reading.loop
    if not rank.first_epoch or is_another:
        return {
            "first_epoch": reading.epoch,
            "first_epoch_s": now_s,
            "epoch_length_s": None,
            "warm_up": None,
        }
    num_done = reading.epoch - rank.first_epoch
    if reading.epoch != rank.epoch and num_done > 0:
        return {"epoch_length_s": (now_s - rank.first_epoch_s - rank.warm_up_s) / num_done}
    if reading.state is WorkerState.EVALUATING and num_done == 0 and _has_trained(reading):
        return {"epoch_length_s": now_s - rank.first_epoch_s - rank.warm_up_s}
    return {}


def _has_trained(reading: SlotReading) -> bool:
    """Return whether the training loop of the current epoch has ended."""
    return reading.trained[2] == reading.epoch


def _points_before(rank: RankView, reading: SlotReading, *, is_evaluating: bool) -> tuple[RatePoint, ...]:
    """Return the rate points before a reading; none if the phase changed, or if a new loop began after a pause."""
    points = rank.rate_points
    is_new_loop = reading.loop != rank.reading.loop
    has_paused = is_new_loop and points and reading.step_time_s - points[-1].time_s >= _PAUSE_S
    return () if has_paused or is_evaluating != rank.is_evaluating else points


def _state(rank: RankView, read: WorkerState) -> WorkerState:
    """Return the state of a rank: events determine it at the start and end, and the board determines it in between."""
    if rank.state.is_final:
        return rank.state
    if rank.has_returned:
        return WorkerState.FINISHING
    if read.is_final:  # the next event reports how it ended
        return rank.state
    return max(read, WorkerState.RUNNING) if rank.state >= WorkerState.RUNNING else read


_NUM_NOTES = 20
_NUM_CURVES = 12  # logged metrics with charts
_STOP_SIGNALS = {-2, -9, -15}  # exit codes after signals from the launcher: SIGINT, SIGKILL, SIGTERM


def fold(view: JobView, *arrived: Event) -> JobView:
    """Return the view, updated with events in order of arrival. Events with unknown types or ranks change nothing.

    This is cheap even if ranks print a lot, because only the last line that arrives from each rank is read.
    """
    for are_rank_events, group in groupby(arrived, lambda event: type(event) in _RANK_EVENTS):
        view = (_fold_ranks if are_rank_events else _fold_others)(view, group)
    return view


def _fold_others(view: JobView, group: Iterable[Event]) -> JobView:
    for event in group:
        if (on_job := _JOB_FOLDS.get(type(event))) is not None:
            view = on_job(view, event)
    return view


def _fold_ranks(view: JobView, group: Iterable[Event]) -> JobView:
    # Copy the list only once, because copying hundreds of ranks takes as long as folding an event.
    ranks = list(view.ranks)
    for event in _merged(group):
        if 0 <= event.rank < len(ranks):
            ranks[event.rank] = _RANK_FOLDS[type(event)](ranks, ranks[event.rank], event)
    return replace(view, ranks=ranks)


class _Printed(NamedTuple):
    """A summary that replaces a rank's :class:`events.LogLines`, because ranks may print millions of lines."""

    rank: int
    time_s: float
    last_line: str
    num_lines: int


def _merged(group: Iterable[Event]) -> list[Event | _Printed]:
    """Return the events in order, with one summary of each rank's printed lines, and without redrawn bars."""
    kept: list[Event | _Printed] = []
    printed: dict[int, list[events.LogLines]] = {}
    redrawn: set[int] = set()
    for event in reversed(list(group)):
        if isinstance(event, events.LogLines):
            if event.lines:
                printed.setdefault(event.rank, []).append(event)
            continue
        if isinstance(event, events.StatusLine):
            if event.rank in redrawn:
                continue
            if event.text.isprintable() and event.text.strip():
                redrawn.add(event.rank)
        kept.append(event)
    for rank, of_rank in printed.items():
        last, num_lines = of_rank[0], sum(len(event.lines) for event in of_rank)
        kept.append(_Printed(rank, last.time_s, last.lines[-1], num_lines))
    return kept[::-1]


def _with_rank(view: JobView, rank: RankView) -> JobView:
    ranks = list(view.ranks)
    ranks[rank.rank] = rank
    return replace(view, ranks=ranks)


def _job_started(view: JobView, event: events.AttemptStarted) -> JobView:
    return replace(
        view,
        start=event,
        end=NOT_ENDED,
        # For the user, a restarted job is still the same job.
        started_s=view.started_s if event.attempt and view.started_s else event.time_s,
        now_s=event.time_s,
        hang=(),
        slow="",
        facts={},
        runs={},
        curves={},
        epochs={},
        ranks=tuple(RankView(rank, SlotReading(rank)) for rank in range(event.num_processes)),
    )


def _job_ended(view: JobView, event: events.JobEnded) -> JobView:
    view = replace(view, end=event, now_s=max(event.time_s, view.started_s))
    return replace(
        view, ranks=tuple(_with_training_numbers(_with_outcome(view, rank)) for rank in view.ranks)
    )


def _with_training_numbers(rank: RankView) -> RankView:
    """Return a finished rank with the numbers from its training, not from the evaluation that followed."""
    if rank.state is not WorkerState.DONE:
        return rank
    step, total, epoch = rank.reading.trained
    if not epoch:
        return rank
    rank = replace(rank, reading=replace(rank.reading, step=step, total=total, epoch=epoch))
    if not rank.is_evaluating:
        return rank
    steps_per_s, samples_per_s, busy_step_s = rank.trained_rates
    return replace(rank, steps_per_s=steps_per_s, samples_per_s=samples_per_s, busy_step_s=busy_step_s)


def _with_outcome(view: JobView, rank: RankView) -> RankView:
    """Return a rank in its final state, given the job's outcome; a rank that the launcher stopped has not failed."""
    if view.outcome == "failed" and rank.rank == view.end.failed_rank:
        message = first_line(view.end.message)
        failure = message if view.end.has_hung else rank.failure or message
        if rank.exit_status is not None and rank.failure.startswith(str(rank.exit_status)):
            failure = message or rank.failure  # the message says how the process ended and what that means
        return replace(rank, state=WorkerState.FAILED, failure=failure, is_consequence=False)
    was_stopped = rank.exit_status is not None and rank.exit_status.code in _STOP_SIGNALS
    was_ended = was_stopped and not rank.is_consequence
    # Errors that waiting ranks raise when their peers are stopped do not explain the failure.
    was_waiting = view.end.has_hung and rank.is_consequence
    if rank.state is WorkerState.FAILED and (was_ended or was_waiting):
        return replace(rank, state=WorkerState.STOPPED, failure="")
    if rank.state.is_final:
        return rank
    if view.outcome == "left":
        return rank
    is_done = rank.has_returned or view.outcome == "done"
    return replace(rank.without_line(), state=WorkerState.DONE if is_done else WorkerState.STOPPED)


def _note(view: JobView, event: events.Note) -> JobView:
    if event.kind == "hang":
        return replace(view, hang=tuple(single_line(line) for line in event.text.splitlines()))
    if event.kind == "slow":
        return replace(view, slow=single_line(event.text))
    note = (event.rank, single_line(event.text))
    if event.kind != "warning":
        return replace(view, notes=(*view.notes, note)[-_NUM_NOTES:])
    if note in view.warnings:
        return view
    return replace(view, warnings=(*view.warnings, note)[-_NUM_NOTES:])


def _fact(view: JobView, event: events.Fact) -> JobView:
    return replace(view, facts={**view.facts, single_line(event.name): single_line(event.text)})


def _run_tracked(view: JobView, event: events.RunTracked) -> JobView:
    return replace(view, runs={**view.runs, single_line(event.tracker): single_line(event.location)})


def _printed(ranks: Sequence[RankView], rank: RankView, event: _Printed) -> RankView:
    return replace(
        rank,
        last_line=single_line(event.last_line),
        num_lines=rank.num_lines + event.num_lines,
        changed_s=max(rank.changed_s, event.time_s),
    )


def _started(ranks: Sequence[RankView], rank: RankView, event: events.Started) -> RankView:
    return replace(rank, state=max(rank.state, WorkerState.RUNNING))


def _metric(view: JobView, event: events.Metric) -> JobView:
    if not 0 <= event.rank < len(view.ranks):
        return view
    rank = view.ranks[event.rank]
    rank = replace(rank, metrics={**rank.metrics, **event.values}, metrics_step=event.step)
    view = replace(_with_rank(view, rank), curves=_with_points(view, event))
    if not event.epoch:
        return view
    # The values were logged during the current epoch, or after the last epoch had ended.
    key = rank.training + (event.epoch < rank.ended_epoch), event.epoch
    epoch = view.epochs.get(key, EpochView())
    return _with_epoch(view, key, replace(epoch, metrics={**epoch.metrics, **event.values}))


def _epoch_ended(view: JobView, event: events.EpochEnded) -> JobView:
    if not 0 <= event.rank < len(view.ranks):
        return view
    rank = view.ranks[event.rank]
    # Epoch numbers that do not increase belong to another training run of the same function.
    training = rank.training + (event.epoch <= rank.ended_epoch)
    view = _with_rank(view, replace(rank, training=training, ended_epoch=event.epoch))
    epoch = view.epochs.get((training, event.epoch), EpochView())
    epoch = replace(epoch, duration_s=max(epoch.duration_s, event.duration_s))
    if event.loss is not None:
        epoch = replace(epoch, losses=epoch.losses + event.loss, num_losses=epoch.num_losses + 1)
    return _with_epoch(view, (training, event.epoch), epoch)


def _with_epoch(view: JobView, key: tuple[int, int], epoch: EpochView) -> JobView:
    epochs = {**view.epochs, key: epoch}
    for oldest in sorted(epochs)[:-NUM_EPOCHS]:
        del epochs[oldest]
    return replace(view, epochs=epochs)


def _with_points(view: JobView, event: events.Metric) -> Mapping[str, Curve]:
    """Return the curves of ``view``, extended by the finite numbers in ``event``."""
    extended = dict(view.curves)
    for name, value in event.values.items():
        is_number = (
            isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST_DRAWN
        )
        if not is_number or (name not in extended and len(extended) >= _NUM_CURVES):
            continue
        curve = extended.get(name, Curve())
        extended[name] = curve.extended(_position(event.step, curve), float(value), CHART_LENGTH)
    return extended


def _position(step: object, curve: Curve) -> float:
    """Return the x coordinate of a point logged with ``step``; if ``step`` is not a number, put it after all others."""
    if isinstance(step, (int, float)) and abs(step) < LARGEST_DRAWN:
        return float(step)
    return float(curve.num_seen)


def _host_memory(view: JobView, event: events.HostMemory) -> JobView:
    if not 0 <= event.rank < len(view.ranks) or view.ranks[event.rank].state.is_final:
        return view
    rank = view.ranks[event.rank]
    peak = max(event.num_bytes, event.peak_bytes, rank.host_peak_bytes or 0)
    view = _with_rank(view, replace(rank, host_bytes=event.num_bytes, host_peak_bytes=peak))
    if not event.is_proportional:  # a sum would count shared pages once for each rank
        return view
    # Ranks that have exited hold no memory. Samples from other machines arrive late.
    total = sum(rank.host_bytes or 0 for rank in view.ranks if rank.exited_s > event.time_s)
    return replace(view, host_peak_bytes=max(total, event.job_peak_bytes, view.host_peak_bytes or 0))


def _status_line(ranks: Sequence[RankView], rank: RankView, event: events.StatusLine) -> RankView:
    line = single_line(event.text).strip()
    changed_s = max(rank.changed_s, event.time_s)
    if rank.status_line and not line:
        return replace(rank, line_gone_s=rank.line_gone_s or event.time_s, changed_s=changed_s)
    return replace(rank, status_line=line, line_gone_s=0.0, changed_s=changed_s)


def _device_use(ranks: Sequence[RankView], rank: RankView, event: events.DeviceUse) -> RankView:
    return replace(rank, device_use=event.share)


def _stalled(ranks: Sequence[RankView], rank: RankView, event: events.Stalled) -> RankView:
    return replace(rank, stall=replace(event, where=single_line(event.where)))


def _returned(ranks: Sequence[RankView], rank: RankView, event: events.Returned) -> RankView:
    state = rank.state if rank.state.is_final else WorkerState.FINISHING
    return replace(rank, state=state, has_returned=True)


def _failed(ranks: Sequence[RankView], rank: RankView, event: events.Failed) -> RankView:
    if event.info.type_name.rpartition(".")[2] == "KeyboardInterrupt":
        return replace(rank.without_line(), state=WorkerState.STOPPED)
    return replace(
        rank.without_line(),
        state=WorkerState.FAILED,
        failure=describe_failure(event.info),
        failed_at=failed_line(event.info),
        is_consequence=event.is_consequence,
    )


def _exited(ranks: Sequence[RankView], rank: RankView, event: events.Exited) -> RankView:
    rank = replace(rank.without_line(), exit_status=event.status, exited_s=event.time_s)
    if rank.state.is_final:
        return rank
    is_success = event.status.code == 0 or not event.status.is_known
    if rank.has_returned and (is_success or event.status.code in _STOP_SIGNALS):
        # The launcher may have stopped the process because one of its threads did not end.
        return replace(rank, state=WorkerState.DONE)
    over = (WorkerState.FAILED, WorkerState.STOPPED)
    others_ended = any(other.state in over for other in ranks if other.rank != rank.rank)
    if (event.was_stopped or others_ended) and event.status.code in _STOP_SIGNALS:
        return replace(rank, state=WorkerState.STOPPED)
    failure = str(event.status)
    # Other exit codes need no explanation, and a script chooses its own.
    if not rank.has_returned and (event.status.code == 0 or not event.status.is_known):
        failure += " before the function returned"
    return replace(rank, state=WorkerState.FAILED, failure=failure)


def describe_failure(info: events.ExceptionInfo) -> str:
    """Return an exception as one line: type and message."""
    return single_line(f"{info.type_name.rpartition('.')[2]}: {first_line(info.message)}".removesuffix(": "))


def failed_line(info: events.ExceptionInfo) -> str:
    """Return the innermost line of the user's code, ``line 9: loss = model(batch)``; empty if there is none."""
    frames = [frame for frame in info.frames if frame.is_user]
    return (
        single_line(f"line {frames[-1].lineno}: {frames[-1].line.strip()}".removesuffix(": "))
        if frames
        else ""
    )


_JOB_FOLDS: dict[type[Event], Callable[[JobView, Any], JobView]] = {
    events.AttemptStarted: _job_started,
    events.JobEnded: _job_ended,
    events.Note: _note,
    events.Fact: _fact,
    events.RunTracked: _run_tracked,
    events.Metric: _metric,
    events.EpochEnded: _epoch_ended,
    events.HostMemory: _host_memory,
}

_RANK_FOLDS: dict[type, Callable[[Sequence[RankView], RankView, Any], RankView]] = {
    events.Started: _started,
    _Printed: _printed,
    events.StatusLine: _status_line,
    events.DeviceUse: _device_use,
    events.Stalled: _stalled,
    events.Returned: _returned,
    events.Failed: _failed,
    events.Exited: _exited,
}

_RANK_EVENTS = {*_RANK_FOLDS, events.LogLines}  # LogLines are folded together, as _Printed
