"""All text shown for a job, without layout: rows, headline, failures, notices, epochs.

    rank  state            epoch      step  steps/s ...
     all  training, 1 slow   2/6   450/1,000    24.1
      11  training, slow     2/6   450/1,000    24.1
    ranks 0-10 and 12-63 training

There is one row for the whole job, and one for each rank. With more than :data:`MAX_ALL_IN_ROWS` ranks, a line of text
replaces the rows of ranks in lockstep. Text, HTML and widgets draw the same table, so they show the same numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from nblaunch import formatting
from nblaunch.dashboard.columns import COLUMNS, WholeJob, furthest_behind, used_columns
from nblaunch.dashboard.notices import (
    JobStall,
    Notice,
    as_of_now,
    job_stall,
    notices,
    settled_state,
    stall_text,
)
from nblaunch.dashboard.result import Failure, Figure, alike, failures, figures, shown_metrics
from nblaunch.dashboard.view import EpochView, JobView, RankView
from nblaunch.events import WorkerState
from nblaunch.formatting import duration, loss, rate, single_line, whole_duration

MAX_ALL_IN_ROWS = 16
"""Maximum number of ranks in a table that shows each rank in its own row."""

MAX_DIFFERING_ROWS = 12
"""Maximum number of rows for ranks that differ; further ranks are also collapsed."""

HEAD_LINES = 500
"""Number of a rank's lines that a cell prints immediately; ``lines.py`` omits further lines."""

_NO_PROGRESS = "no progress"
_CUT_OFF = "cut off"  # the rank failed because another rank did

_LONG_NAMES = 40  # maximum number of characters in a list of ranks


@dataclass(frozen=True)
class Row:
    """A row of the table: one rank, or the whole job.

    Args:
        rank: None for the whole job.
        label: text of the rank column.
        state: decides colour and shape.
        state_text: text of the state column.
        cells: one string per column of the table; strings may be empty.
        fraction: progress, 0 to 1, or None.
        detail: the worker's progress bar as text, the call in which it is waiting, its last line or its exit status.
        is_marked: the rank differs from the others.
        is_secondary: the rank failed because another rank failed.
        is_stuck: other ranks are waiting for this one, or all ranks are stuck.
    """

    rank: int | None
    label: str
    state: WorkerState
    state_text: str
    cells: tuple[str, ...]
    fraction: float | None = None
    detail: str = ""
    is_marked: bool = False
    is_secondary: bool = False
    is_stuck: bool = False


def rows_of(
    view: JobView, notices: Sequence[Notice], left_s: float | None
) -> tuple[tuple[str, ...], tuple[Row, ...], str]:
    """Return the rows of a job.

    Args:
        view: the job, with current rates (``notices.as_of_now``).
        notices: the job's notices.
        left_s: seconds until the job ends (``JobView.left_s``, which is slow to compute for many ranks).

    Returns:
        The names of the columns between state and detail; the rows; and the other ranks in words, empty if all ranks
        have a row. The first row is the whole job, unless it has a single rank. The others are the ranks that differ,
        or all ranks if there are few.
    """
    if view.is_over:
        view = replace(view, ranks=tuple(map(_with_mean_rates, view.ranks)))
    marks = {rank: notice.kind for notice in reversed(notices) for rank in notice.ranks}
    columns = used_columns(view)
    are_few = len(view.ranks) <= MAX_ALL_IN_ROWS
    statuses = [_status_of(view, rank) for rank in view.ranks]
    shown = list(range(len(view.ranks))) if are_few else _differing_ranks(view, statuses, marks)
    num_marked = sum(
        not view.ranks[rank].state.is_final for rank in shown if marks.get(rank, "stalled") != "stalled"
    )
    whole = [_whole(view, statuses, num_marked, columns, left_s)] if len(view.ranks) > 1 else []
    ranks = [_row(view, view.ranks[rank], statuses[rank], marks, columns) for rank in shown]
    rows = (*whole, *ranks)
    if view.is_over:  # no later text needs an empty column
        used = [index for index in range(len(columns)) if any(row.cells[index] for row in rows)]
        columns = tuple(columns[index] for index in used)
        rows = tuple(replace(row, cells=tuple(row.cells[index] for index in used)) for row in rows)
    return columns, rows, "" if are_few else _collapsed(statuses, shown)


def _with_mean_rates(rank: RankView) -> RankView:
    """Return a rank of a job that has ended, with its mean rates over the whole job."""
    steps_per_s, samples_per_s = rank.mean_rates
    if steps_per_s is None:
        return rank
    return replace(rank, steps_per_s=steps_per_s, samples_per_s=samples_per_s)


# --- one rank --------------------------------------------------------------------------------------------------------


class _RankStatus(NamedTuple):
    """A rank's activity: its state, a word for it, and its place in the code if the rank is making no progress."""

    state: WorkerState
    word: str
    where: str


def _status_of(view: JobView, rank: RankView) -> _RankStatus:
    stalled = stall_text(view, rank)
    if stalled:
        waits = rank.stall is not None and bool(rank.stall.waiting_in)
        return _RankStatus(WorkerState.WAITING, "waiting" if waits else _NO_PROGRESS, stalled)
    state = settled_state(view, rank)
    if state is WorkerState.FAILED and rank.is_consequence:
        return _RankStatus(state, _CUT_OFF, "")
    return _RankStatus(state, "killed" if rank.is_killed else state.name.lower(), "")


def _row(
    view: JobView, rank: RankView, status: _RankStatus, marks: Mapping[int, str], columns: Sequence[str]
) -> Row:
    # A single rank can't differ from others, and the state of a stalled rank already shows that it is stalled.
    mark = marks.get(rank.rank, "") if len(view.ranks) > 1 and not rank.state.is_final else ""
    words = "" if mark == "stalled" else mark
    return Row(
        rank=rank.rank,
        label=str(rank.rank),
        state=status.state,
        state_text=f"{status.word}, {words}" if words else status.word,
        cells=tuple(COLUMNS[name].of_rank(rank) for name in columns),
        fraction=_fraction(rank),
        detail=status.where or _detail(rank),
        is_marked=bool(mark),
        is_secondary=rank.is_consequence and status.state is WorkerState.FAILED,
        is_stuck=status.word == _NO_PROGRESS and _is_certain(rank),
    )


def _is_certain(rank: RankView) -> bool:
    """Return whether the launcher knows that a rank is making no progress."""
    return rank.stall is not None and rank.stall.is_certain


def _fraction(rank: RankView) -> float | None:
    """Return the progress of the rank's epochs, or of its own progress bar if it has no loader."""
    if rank.job_fraction is None and not rank.has_progress and (bar := rank.bar):
        return bar.fraction
    return rank.job_fraction


def _detail(rank: RankView) -> str:
    if rank.exit_status is not None and rank.exit_status.code not in (0, 1):
        return str(rank.exit_status)
    if rank.state.is_final:
        return ""
    if bar := rank.bar:
        return bar.text
    # The cell shows printed lines below the table, unless this rank prints so much that they are omitted.
    return rank.status_line or (rank.last_line if rank.num_lines > HEAD_LINES else "")


# --- the whole job ---------------------------------------------------------------------------------------------------


def _whole(
    view: JobView,
    statuses: Sequence[_RankStatus],
    num_marked: int,
    columns: Sequence[str],
    left_s: float | None,
) -> Row:
    """Return the row for all ranks: the progress of the slowest, and the combined throughput and memory."""
    ranks = view.ranks
    job = WholeJob(view, furthest_behind(view), left_s)
    (most, _), *_ = Counter(status.state for status in statuses).most_common(1)
    has_failed = any(rank.state is WorkerState.FAILED for rank in ranks)
    return Row(
        rank=None,
        label="all",
        state=WorkerState.FAILED if has_failed else most,
        state_text=_counted(statuses, num_marked),
        cells=tuple(COLUMNS[name].of_job(job) for name in columns),
        fraction=_fraction(job.last),
        is_marked=num_marked > 0,
        is_stuck=any(
            status.word == _NO_PROGRESS and _is_certain(rank)
            for rank, status in zip(ranks, statuses, strict=True)
        ),
    )


def _counted(statuses: Sequence[_RankStatus], num_marked: int) -> str:
    """Return the states in words, failures and stalls first: ``training, 1 differs``, ``3 waiting, 1 done``."""
    words = Counter(status.word for status in statuses)
    if len(words) == 1:
        differing = f", {num_marked} {'differs' if num_marked == 1 else 'differ'}" if num_marked else ""
        return f"{statuses[0].word}{differing}"
    failed = sorted(
        (status.word for status in statuses if status.state is WorkerState.FAILED), key=_CUT_OFF.__eq__
    )
    if set(words) == {_NO_PROGRESS, WorkerState.WAITING.name.lower()}:
        return _NO_PROGRESS  # the headline says where each rank is
    stalled = [_NO_PROGRESS] * (_NO_PROGRESS in words)
    first, *others = dict.fromkeys([*failed, *stalled, *(word for word, _ in words.most_common())])
    named = others[0] if len(others) == 1 else "other"
    return f"{words[first]} {first}, {len(statuses) - words[first]} {named}"


# --- ranks that differ, and the others -------------------------------------------------------------------------------


def _differing_ranks(view: JobView, statuses: Sequence[_RankStatus], marks: Mapping[int, str]) -> list[int]:
    """Select ranks that differ, up to a limit: failed ranks first, then ranks with notices, then rare states."""
    counts = Counter(status.word for status in statuses)
    few = max(len(statuses) // 8, 1)
    failed = [rank for rank in view.ranks if rank.state is WorkerState.FAILED]
    failed.sort(key=lambda rank: (rank.rank != view.end.failed_rank, rank.is_consequence, rank.rank))
    noticed = [rank for rank in sorted(marks) if len(marks) <= len(statuses) // 2]
    alone = [rank for rank, status in enumerate(statuses) if counts[status.word] <= few]
    ordered = dict.fromkeys([*(rank.rank for rank in failed), *noticed, *alone])
    return sorted(list(ordered)[:MAX_DIFFERING_ROWS])


def _collapsed(statuses: Sequence[_RankStatus], differing: Collection[int]) -> str:
    """Describe the other ranks in words: ``ranks 0-7 training; ranks 8-15 waiting``."""
    words = {rank: status.word for rank, status in enumerate(statuses) if rank not in differing}
    return "; ".join(f"{_named(ranks)} {word}" for word, ranks in formatting.ranks_by_text(words).items())


def _named(ranks: Sequence[int]) -> str:
    names = formatting.ranks(ranks)
    return names if len(names) <= _LONG_NAMES else formatting.count(len(ranks), "rank")


_NUM_NOTES = 5

LIVE_ROWS = 8
"""Maximum number of recent epochs in the table while a job runs."""

_ALL_ROWS = 30  # when the job has ended
_NUM_METRICS = 8


@dataclass(frozen=True)
class EpochTable:
    """The table of epochs as text cells.

    Args:
        columns: names of the columns.
        rows: the last epochs, oldest first; a cell per column.
        note: text below the table, if there are more epochs.
    """

    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Table:
    """All text that is displayed for a job.

    Args:
        columns: names of the columns between state and detail.
        rows: a row for the whole job, unless it has a single rank, followed by the ranks that differ, or by all ranks
            if there are few.
        collapsed: ranks in lockstep, in words; empty if all ranks have a row.
        name: name of the function that runs.
        headline: state of the job: ``running for 12 s``.
        progress: ``epoch 3 of 10 · 31 % · 4:12 left · loss 0.171 · 412 samples/s``; may be empty.
        stall: where the job is stuck; None while it is making progress.
        setting: number of processes, backend, start method.
        fallback: reason for an unusual start method; empty if it is usual.
        failures: root cause first.
        figures: numbers of a job that has ended.
        alike: what all ranks did, in words, if ``rows`` add nothing; empty otherwise.
        notices: slow and stalled ranks, losses that are not finite.
        epochs: losses and metrics of each epoch.
        metrics: the last logged values in one line, if they are not all in ``epochs``; may be empty.
        warnings: warnings from the launcher and the workers.
        notes: notes from the launcher and the workers, except warnings.
        runs: ``(tracker, address or command)`` of runs that trackers have started.
        log_dir: folder with the complete logs; empty if there is none.
    """

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    collapsed: str
    name: str
    headline: str
    progress: str
    stall: JobStall | None
    setting: str
    fallback: str
    failures: tuple[Failure, ...]
    figures: tuple[Figure, ...]
    alike: str
    notices: tuple[Notice, ...]
    epochs: EpochTable
    metrics: str
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    runs: tuple[tuple[str, str], ...]
    log_dir: str


def tabulate(view: JobView) -> Table:
    """Return the table of a job."""
    still = job_stall(view)
    shown = notices(view)
    if still is not None:  # the headline already has the notices without details
        shown = tuple(notice for notice in shown if notice.kind != "stalled" or notice.lines)
    view = as_of_now(view)
    left_s = view.left_s
    columns, rows, collapsed = rows_of(view, shown, left_s)
    return Table(
        columns=columns,
        rows=rows,
        collapsed=collapsed,
        name=single_line(view.start.function_name) or "job",
        headline=headline(view),
        progress=_progress(view, left_s),
        stall=still,
        setting=_setting(view),
        fallback=single_line(view.start.fallback),
        failures=failures(view),
        figures=figures(view) if view.is_over and view.is_started else (),
        alike="" if any(notice.ranks for notice in shown) else alike(view),
        notices=shown,
        epochs=tabulate_epochs(view),
        metrics=_metrics(view),
        warnings=_notes(view.warnings),
        notes=_notes(view.notes[-_NUM_NOTES:]),
        runs=tuple(view.runs.items()),
        log_dir=view.start.log_dir,
    )


# --- text ----------------------------------------------------------------------------------------------------------

_OUTCOMES = {
    "done": "done in",
    "failed": "failed after",
    "interrupted": "interrupted after",
    "left": "still running, no longer followed after",
}


def headline(view: JobView) -> str:
    """Return the state of the job: ``running for 12 s``, ``rank 2 failed, running for 12 s``, ``done in 3:07``."""
    if not view.is_started:
        return "starting" if not view.is_over else "not started"
    if view.is_over:
        if view.outcome == "done" and view.end.is_early:
            return f"stopped early on request after {duration(view.elapsed_s)}"
        is_of_rank = view.outcome == "failed" and view.end.failed_rank is not None
        outcome = (
            f"failed in rank {view.end.failed_rank} after"
            if is_of_rank
            else _OUTCOMES.get(view.outcome, "cancelled after")
        )
        return f"{outcome} {duration(view.elapsed_s)}"
    failed = [rank.rank for rank in view.ranks if rank.failure and not rank.is_consequence]
    first = f"{formatting.ranks(failed)} failed, " if failed else ""
    # Show whole seconds while the job runs, because a table is published only when its text has changed.
    return f"{first}running for {whole_duration(int(view.elapsed_s))}"


def _progress(view: JobView, left_s: float | None) -> str:
    """Return the progress of the rank furthest behind, and the loss and throughput of all ranks; empty if unknown.

    If the number of epochs is unknown, the percentage refers to the epoch, and no remaining time is shown. The result
    is empty for a job with a failed rank, because such a job never finishes.
    """
    if view.is_over or not view.ranks or any(rank.failure for rank in view.ranks):
        return ""
    last = furthest_behind(view)
    if not last.has_progress:
        return ""
    is_known = 0 < last.epoch <= last.num_epochs
    trains = last.epoch > 0 or last.state is WorkerState.TRAINING
    job = WholeJob(view, last, left_s)
    mean_loss, samples_per_s = COLUMNS["loss"].of_job(job), sum(job.known("samples_per_s"))
    fraction = last.job_fraction
    parts = [
        _position(last, is_known=is_known),
        ""
        if fraction is None
        else f"{int(100 * fraction)} %" + " of the epoch" * (last.epoch > 0 and not is_known),
        "" if left_s is None or not trains else f"{whole_duration(left_s)} left",
        f"loss {mean_loss}" if mean_loss else "",
        f"{rate(samples_per_s)} samples/s" if samples_per_s else "",
    ]
    return " · ".join(part for part in parts if part)


def _position(rank: RankView, *, is_known: bool) -> str:
    """Return ``epoch 3 of 10``, or ``step 310 of 1,000`` for a loop without epochs."""
    if rank.epoch:
        return f"epoch {rank.epoch}" + (f" of {rank.num_epochs}" if is_known else "")
    return f"step {rank.step:,}" + (f" of {rank.total:,}" if rank.total >= 0 else "")


def _setting(view: JobView) -> str:
    start, facts = view.start, dict(view.facts)
    # Workers report the precision if it differs from the setting.
    precision = facts.pop("precision", "" if start.mixed_precision == "no" else start.mixed_precision)
    spanning = "spmd" if start.is_spmd else ""
    parts = (start.backend, start.start_method, spanning, precision, *facts.values())
    how = ", ".join(part for part in parts if part)
    text = formatting.count(len(view.ranks), "process") + (f" ({how})" if how else "")
    if start.attempt:
        text += f", restart {start.attempt}"
    return text


def _notes(notes: Iterable[tuple[int, str]]) -> tuple[str, ...]:
    """Return each text once, preceded by the ranks that sent it; the launcher's notes have a negative rank."""
    senders: dict[str, set[int]] = {}
    for rank, text in notes:
        senders.setdefault(text, set()).add(rank)
    return tuple(
        text if min(ranks) < 0 else f"{formatting.ranks(ranks)}: {text}" for text, ranks in senders.items()
    )


def _metrics(view: JobView) -> str:
    source = next((rank for rank in view.ranks if rank.metrics), None)
    shown = {*metrics_of_epochs(view), *(shown_metrics(view) if view.is_over else ())}
    if source is None or source.metrics.keys() <= shown:
        return ""
    values = [(name, value) for name, value in source.metrics.items() if not (view.is_over and name in shown)]
    parts = [f"{formatting.short_name(name)} {_metric(value)}" for name, value in values[:_NUM_METRICS]]
    return ", ".join(parts) + _step(source.metrics_step)


def _step(step: float | str | None) -> str:
    if step is None:
        return ""
    return f" (step {single_line(step)})" if isinstance(step, str) else f" (step {step:,})"


def _metric(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else single_line(str(value)[:20])


# --- epochs --------------------------------------------------------------------------------------------------------


def tabulate_epochs(view: JobView) -> EpochTable:
    """Return the table of epochs; an empty one if there are neither losses nor metrics."""
    epochs = sorted(view.epochs.items())
    names = metrics_of_epochs(view)
    has_loss = any(epoch.loss is not None for _, epoch in epochs)
    if not has_loss and not names:
        return EpochTable()
    shown = epochs[-_ALL_ROWS if view.is_over else -LIVE_ROWS :]
    return EpochTable(
        columns=(
            "epoch",
            *(["training loss"] if has_loss else []),
            *map(formatting.short_name, names),
            "time",
        ),
        rows=tuple(_epoch_row(number, epoch, names, has_loss=has_loss) for (_, number), epoch in shown),
        note="earlier epochs are not shown" if len(epochs) > len(shown) else "",
    )


def metrics_of_epochs(view: JobView) -> tuple[str, ...]:
    """Return the names of the metrics in the table of epochs, in the order in which they were first logged."""
    names = dict.fromkeys(name for _, epoch in sorted(view.epochs.items()) for name in epoch.metrics)
    return tuple(names)[:_NUM_METRICS]


def _epoch_row(number: int, epoch: EpochView, names: Sequence[str], *, has_loss: bool) -> tuple[str, ...]:
    training = [] if not has_loss else ["" if epoch.loss is None else loss(epoch.loss)]
    values = [_epoch_value(epoch.metrics[name]) if name in epoch.metrics else "" for name in names]
    return (str(number), *training, *values, duration(epoch.duration_s) if epoch.duration_s else "")


def _epoch_value(value: object) -> str:
    return loss(value) if isinstance(value, float) else single_line(str(value)[:20])
