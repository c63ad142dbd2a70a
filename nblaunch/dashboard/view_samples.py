"""What a view becomes by a look at the board: steps, rates, losses, memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isfinite

from nblaunch.dashboard.view import (
    HISTORY_LENGTH,
    LINE_STAYS_S,
    WINDOW_S,
    JobView,
    Mark,
    RankView,
    TrainingPass,
)
from nblaunch.events import WorkerState
from nblaunch.wire.board import Sample

_MARK_SPACING_S = 0.5
_SAME_LOSS_S = 2.0  # a loss that is the same for longer stands still
_PASSES = {WorkerState.TRAINING, WorkerState.EVALUATING}


def fold_samples(view: JobView, samples: Sequence[Sample], now_s: float) -> JobView:
    """The view after a look at the board at ``now_s`` (``time.time()``). Cheap where nothing moved."""
    ranks = view.ranks
    changed = [
        sample for sample in samples if 0 <= sample.rank < len(ranks) and sample != ranks[sample.rank].sample
    ]
    if changed:
        moved = list(ranks)
        for sample in changed:
            moved[sample.rank] = _sampled(moved[sample.rank], sample, now_s)
        ranks = tuple(moved)
    if any(_has_lost_line(rank, now_s) for rank in ranks):
        ranks = tuple(rank.without_line() if _has_lost_line(rank, now_s) else rank for rank in ranks)
    return replace(view, ranks=ranks, now_s=view.now_s if view.is_over else max(now_s, view.now_s))


def _has_lost_line(rank: RankView, now_s: float) -> bool:
    return rank.line_gone_s > 0 and now_s - rank.line_gone_s >= LINE_STAYS_S


def _sampled(rank: RankView, sample: Sample, now_s: float) -> RankView:
    last = rank.sample or Sample(rank.rank)
    is_new_pass = _is_new_pass(last, sample)
    has_new_state = rank.state_s == 0.0 or sample.state != last.state
    has_waited = has_new_state and last.state is WorkerState.WAITING
    steps_done = rank.steps_done + (sample.step if is_new_pass else sample.step - last.step)
    moved = is_new_pass or sample.step != last.step
    marks = _marked(() if is_new_pass else rank.marks, sample, steps_done)
    steps_per_s, samples_per_s = _rates(marks, rank)
    rank = replace(
        _with_loss(rank, sample, steps_done, moved=moved),
        state=_state(rank, sample.state),
        step=sample.step,
        total=sample.total,
        epoch=sample.epoch,
        steps_per_s=steps_per_s,
        samples_per_s=samples_per_s,
        own_step_s=_own_step_s(marks, rank),
        stepped_s=now_s if moved else rank.stepped_s,
        moved_s=now_s,
        state_s=now_s if has_new_state else rank.state_s,
        waited_s=rank.waited_s + (max(now_s - rank.state_s, 0.0) if has_waited else 0.0),
        num_waits=rank.num_waits + (has_new_state and sample.state is WorkerState.WAITING),
        device_bytes=sample.device_bytes or rank.device_bytes,
        device_peak_bytes=sample.device_peak_bytes or rank.device_peak_bytes,
        device_limit_bytes=sample.device_limit_bytes or rank.device_limit_bytes,
        sample=sample,
        marks=marks,
        steps_done=steps_done,
    )
    return replace(rank, trained=_trained(rank, sample))


def _trained(rank: RankView, sample: Sample) -> TrainingPass | None:
    trained = rank.trained
    if sample.state is WorkerState.TRAINING or (trained is not None and _goes_on(trained, sample)):
        return TrainingPass(
            rank.step, rank.total, rank.epoch, rank.steps_per_s, rank.samples_per_s, rank.own_step_s
        )
    if trained is not None and sample.epoch > trained.epoch:  # it was seen to its end, between two looks
        return replace(trained, epoch=sample.epoch, step=max(trained.step, trained.total))
    return trained


def _goes_on(trained: TrainingPass, sample: Sample) -> bool:
    """Whether ``sample`` is of that pass, though its rank was found waiting, or at its end."""
    is_same = (sample.epoch, sample.total) == (trained.epoch, trained.total) and sample.step >= trained.step
    return is_same and sample.state is not WorkerState.EVALUATING


def _is_new_pass(last: Sample, sample: Sample) -> bool:
    if sample.step < last.step or (sample.epoch, sample.total) != (last.epoch, last.total):
        return True
    return last.state != sample.state and {last.state, sample.state} == _PASSES


def _state(rank: RankView, told: WorkerState) -> WorkerState:
    """Events say when a worker starts and how it ends; in between the board knows better."""
    if rank.state.is_final:
        return rank.state
    if rank.has_returned:
        return WorkerState.FINISHING
    if told.is_final:  # its end is near; how it ended is the event's to say
        return rank.state
    return max(told, WorkerState.RUNNING) if rank.state >= WorkerState.RUNNING else told


def _marked(marks: tuple[Mark, ...], sample: Sample, steps_done: int) -> tuple[Mark, ...]:
    """``marks`` with the newest point last, older ones spaced out and dropped beyond the window."""
    if sample.step_time_s <= 0:
        return marks
    newest = Mark(sample.step_time_s, steps_done, sample.samples, sample.own_time_s, sample.own_steps)
    if marks and newest.time_s <= marks[-1].time_s:
        return marks
    # The last point is provisional: it is replaced until it is far enough from the one before.
    if len(marks) >= 2 and marks[-1].time_s - marks[-2].time_s < _MARK_SPACING_S:
        marks = marks[:-1]
    while len(marks) >= 2 and newest.time_s - marks[1].time_s >= WINDOW_S:
        marks = marks[1:]
    return (*marks, newest)


def _rates(marks: tuple[Mark, ...], rank: RankView) -> tuple[float | None, float | None]:
    """Steps and samples per second over the window; what was known before while a new pass has too few points."""
    if len(marks) < 2 or marks[-1].steps == marks[0].steps:
        return rank.steps_per_s, rank.samples_per_s
    span_s = marks[-1].time_s - marks[0].time_s
    num_samples = marks[-1].samples - marks[0].samples
    return (marks[-1].steps - marks[0].steps) / span_s, num_samples / span_s if num_samples > 0 else None


def _own_step_s(marks: tuple[Mark, ...], rank: RankView) -> float | None:
    num_steps = marks[-1].own_steps - marks[0].own_steps if marks else 0
    if num_steps <= 0:
        return rank.own_step_s
    return max(marks[-1].own_time_s - marks[0].own_time_s, 0.0) / num_steps


def _with_loss(rank: RankView, sample: Sample, steps_done: int, *, moved: bool) -> RankView:
    loss = sample.loss
    if loss is None or (loss == rank.loss and not moved):
        return rank
    if not isfinite(loss):
        return replace(rank, loss=loss)
    latest = rank.losses.latest
    if loss == rank.loss and latest and steps_done - latest[0] < (rank.steps_per_s or 0.0) * _SAME_LOSS_S:
        return rank  # losses are told twice a second, whatever the number of steps: it is most likely the one of before
    return replace(rank, loss=loss, losses=rank.losses.extended(float(steps_done), loss, HISTORY_LENGTH))
