"""All text that is shown of a job, without layout: rows, headline, failures, notices, epochs.

Text, HTML and widgets draw the same table, so that they show the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nblaunch import formatting
from nblaunch.dashboard.notices import Notice, as_of_now, notices
from nblaunch.dashboard.rows import Row, furthest_behind, rows_of
from nblaunch.dashboard.view import EpochView, JobView, RankView
from nblaunch.formatting import duration, loss, rate, single_line, whole_duration

_NUM_FAILURE_LINES = 4
_NUM_NOTES = 5
_NUMBER = re.compile(r"\d+")

LIVE_ROWS = 8
"""Largest number of last epochs in the table while a job runs."""

_ALL_ROWS = 30  # when it has ended
_NUM_METRICS = 8


@dataclass(frozen=True)
class EpochTable:
    """The table of epochs as text cells.

    Args:
        columns: their names.
        rows: the last epochs, oldest first; a cell per column.
        note: below the table, if there are more epochs.
    """

    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Table:
    """All text that is shown of a job.

    Args:
        columns: names of the columns between state and detail.
        rows: the whole job, unless it has a single rank; then ranks that differ, or all if they are few.
        collapsed: ranks in lockstep, in words; empty if all ranks have a row.
        name: of the function that runs.
        headline: state of the job: ``running for 12 s``.
        progress: how far it is: ``epoch 3 of 10 · 31 % · 4:12 left · loss 0.171 · 412 samples/s``; may be empty.
        setting: number of processes, backend, start method.
        fallback: why the start method is not the usual one; empty if it is.
        failures: ``(ranks, failure)``, root cause first.
        notices: slow and stalled ranks, losses that are not finite.
        epochs: losses and metrics of each epoch.
        metrics: the last logged values in one line, if they are not all in ``epochs``; may be empty.
        warnings: of the launcher and the workers.
        notes: of the launcher and the workers, without the warnings.
        log_dir: folder of complete logs; may be empty.
    """

    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    collapsed: str
    name: str
    headline: str
    progress: str
    setting: str
    fallback: str
    failures: tuple[tuple[str, str], ...]
    notices: tuple[Notice, ...]
    epochs: EpochTable
    metrics: str
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    log_dir: str


def tabulate(view: JobView) -> Table:
    """Return the table of a job."""
    found = notices(view)
    view = as_of_now(view)
    columns, rows, collapsed = rows_of(view, found)
    return Table(
        columns=columns,
        rows=rows,
        collapsed=collapsed,
        name=single_line(view.start.function_name) or "job",
        headline=headline(view),
        progress=progress(view),
        setting=_setting(view),
        fallback=single_line(view.start.fallback),
        failures=_failures(view),
        notices=found,
        epochs=tabulate_epochs(view),
        metrics=_metrics(view),
        warnings=tuple(_note(rank, text) for rank, text in view.warnings),
        notes=tuple(_note(rank, text) for rank, text in view.notes[-_NUM_NOTES:]),
        log_dir=view.start.log_dir,
    )


# --- text ----------------------------------------------------------------------------------------------------------

_OUTCOMES = {"done": "done in", "failed": "failed after", "interrupted": "interrupted after"}


def headline(view: JobView) -> str:
    """Return the state of the job: ``running for 12 s``, ``done in 3:07``, ``failed in rank 2 after 0.83 s``."""
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
    # Whole seconds while it runs, because a table is published only when its text has changed.
    return f"running for {whole_duration(int(view.elapsed_s))}"


def progress(view: JobView) -> str:
    """Return how far the rank furthest behind is, and the loss and throughput of all; empty where nothing is known.

    Where the number of epochs is unknown, the percentage is of the epoch, and no time left is shown.
    """
    if view.is_over or not view.ranks:
        return ""
    last = furthest_behind(view)
    if not last.has_progress:
        return ""
    is_known = 0 < last.epoch <= last.num_epochs
    losses = [rank.loss for rank in view.ranks if rank.loss is not None]
    rates = [rank.samples_per_s for rank in view.ranks if rank.samples_per_s]
    fraction = last.job_fraction
    parts = [
        f"epoch {last.epoch} of {last.num_epochs}" if is_known else f"epoch {last.epoch}" * bool(last.epoch),
        ""
        if fraction is None
        else f"{int(100 * fraction)} %" + " of the epoch" * (last.epoch > 0 and not is_known),
        "" if view.left_s is None or not last.epoch else f"{whole_duration(view.left_s)} left",
        f"loss {loss(sum(losses) / len(losses))}" if losses else "",
        f"{rate(sum(rates))} samples/s" if rates else "",
    ]
    return " · ".join(part for part in parts if part)


def _setting(view: JobView) -> str:
    start, facts = view.start, dict(view.facts)
    # Workers report it where it differs from the setting.
    precision = facts.pop("precision", "" if start.mixed_precision == "no" else start.mixed_precision)
    spanning = "spmd" if start.is_spmd else ""
    parts = (start.backend, start.start_method, spanning, precision, *facts.values())
    how = ", ".join(part for part in parts if part)
    text = formatting.count(len(view.ranks), "process") + (f" ({how})" if how else "")
    if start.attempt:
        text += f", attempt {start.attempt + 1}"
    return text


def _note(rank: int, text: str) -> str:
    return text if rank < 0 else f"rank {rank}: {text}"


def _failures(view: JobView) -> tuple[tuple[str, str], ...]:
    """Return failures with the root cause first and its consequences last; equal failures of several ranks once."""
    grouped: dict[tuple[bool, bool, str], list[RankView]] = {}
    for rank in view.ranks:
        if rank.failure:
            # Consequences of another rank's failure differ only in ports and addresses.
            text = _NUMBER.sub("0", rank.failure) if rank.is_consequence else rank.failure
            is_other = rank.rank != view.end.failed_rank
            grouped.setdefault((is_other, rank.is_consequence, text), []).append(rank)
    groups = [ranks for _, ranks in sorted(grouped.items(), key=lambda item: item[0])]
    lines = []
    for ranks in groups:
        who = formatting.ranks(rank.rank for rank in ranks)
        lines.append((f"{who} (secondary failure)" if ranks[0].is_consequence else who, ranks[0].failure))
    if len(lines) > _NUM_FAILURE_LINES:
        hidden = sum(map(len, groups[_NUM_FAILURE_LINES:]))
        lines = [*lines[:_NUM_FAILURE_LINES], (formatting.count(hidden, "more rank"), "see the logs")]
    if not lines and view.outcome == "failed" and view.end.message:
        lines = [("job", single_line(view.end.message.strip().partition("\n")[0]))]
    return tuple(lines)


def _metrics(view: JobView) -> str:
    source = next((rank for rank in view.ranks if rank.metrics), None)
    if source is None or source.metrics.keys() <= set(metrics_of_epochs(view)):
        return ""
    parts = [f"{single_line(name)} {_metric(value)}" for name, value in list(source.metrics.items())[:8]]
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
        columns=("epoch", *(["training loss"] if has_loss else []), *map(single_line, names), "time"),
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
