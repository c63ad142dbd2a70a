"""What a table about a job says, as words and numbers, before anybody draws it.

With ``table_rows.py`` it owns the choice of columns and rows, the wording and the formatting of numbers, so that text,
HTML and widgets can't disagree. Knows no markup and no widths.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nblaunch import in_words
from nblaunch.dashboard.notices import Notice, notices
from nblaunch.dashboard.table_rows import (
    NUM_COLUMNS,
    GridCell,
    Row,
    columns_of,
    device_bytes,
    grid_cell,
    narrowed,
    row_of,
    select_ranks,
    summary_row,
)
from nblaunch.dashboard.view import JobView, RankView
from nblaunch.dashboard.wording import clean, duration, rate, whole_duration

_NUM_FAILURE_LINES = 4
_NUM_NOTES = 5
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Table:
    """All that is said about a job.

    Args:
        name: the function that runs.
        headline: how the job is doing, in words.
        setting: number of processes, backend, start method.
        detour: why the start method is not the usual one; empty where it is.
        columns: names of the columns between the state and the detail; only those with something in them.
        rows: one per shown rank, perhaps one that sums up the others.
        grid: the ranks without a row, by rank; in lines of :data:`nblaunch.dashboard.table_rows.GRID_COLUMNS`.
        failures: ``(who, what)``, root cause first.
        notices: what else is wrong, in words.
        metrics: the last logged values, one line; may be empty.
        memory: what the job takes, or took at most, one line; may be empty.
        warnings: from the launcher, about what may go wrong.
        notes: from the launcher and the workers, without the warnings.
        log_dir: where complete logs are; may be empty.
    """

    name: str
    headline: str
    setting: str
    detour: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    grid: tuple[GridCell, ...]
    failures: tuple[tuple[str, str], ...]
    notices: tuple[Notice, ...]
    metrics: str
    memory: str
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    log_dir: str


def tabulate(view: JobView) -> Table:
    """The table for ``view``."""
    shown, others = select_ranks(view)
    rows = [row_of(view, rank) for rank in shown]
    if others:
        rows.append(summary_row(view, others))
    used = [index for index in range(NUM_COLUMNS) if any(row.cells[index] for row in rows)]
    columns = columns_of(view)
    notes = [note for note in view.notes if note not in view.warnings]
    return Table(
        name=view.function_name or "job",
        headline=headline(view),
        setting=_setting(view),
        detour=view.detour,
        columns=tuple(columns[index] for index in used),
        rows=tuple(narrowed(row, used) for row in rows),
        grid=tuple(grid_cell(rank) for rank in others),
        failures=_failures(view),
        notices=notices(view),
        metrics=_metrics(view),
        memory=_memory(view),
        warnings=tuple(_note(rank, text) for rank, text in view.warnings),
        notes=tuple(_note(rank, text) for rank, text in notes[-_NUM_NOTES:]),
        log_dir=view.log_dir,
    )


# --- words ---------------------------------------------------------------------------------------------------------

_OUTCOMES = {"done": "done in", "failed": "failed after", "interrupted": "interrupted after"}


def headline(view: JobView) -> str:
    """How the job is doing: ``running for 12 s``, ``done in 3:07``, ``failed in rank 2 after 0.83 s``."""
    if not view.is_started:
        return "starting" if not view.is_over else "not started"
    if view.is_over:
        if view.outcome == "done" and view.is_early:
            return f"stopped early, as asked, after {duration(view.elapsed_s)}"
        is_of_rank = view.outcome == "failed" and view.failed_rank is not None
        words = (
            f"failed in rank {view.failed_rank} after"
            if is_of_rank
            else _OUTCOMES.get(view.outcome, "cancelled after")
        )
        return f"{words} {duration(view.elapsed_s)}"
    # Whole seconds while it runs: the table is published only when what it says changes.
    return f"running for {whole_duration(int(view.elapsed_s))}"


def _setting(view: JobView) -> str:
    facts = dict(view.facts)
    precision = facts.pop("precision", view.mixed_precision)  # what is in use, rather than what was asked for
    spanning = "spmd" if view.spans_devices else ""
    parts = (view.backend, view.start_method, spanning, precision, *facts.values())
    how = ", ".join(part for part in parts if part)
    text = in_words.count(view.num_processes, "process") + (f" ({how})" if how else "")
    if view.attempt:
        text += f", attempt {view.attempt + 1}"
    samples_per_s = sum(rank.samples_per_s or 0.0 for rank in view.ranks if not rank.state.is_final)
    text += f", {rate(samples_per_s)} samples/s" if samples_per_s > 0 else ""
    # How many passes a function makes, nobody knows but itself.
    return text if view.left_s is None else f"{text}, {whole_duration(view.left_s)} left of this pass"


def _note(rank: int, text: str) -> str:
    return text if rank < 0 else f"rank {rank}: {text}"


def _failures(view: JobView) -> tuple[tuple[str, str], ...]:
    """Root cause first; the same words of several ranks once; what follows from the root cause last."""
    grouped: dict[tuple[bool, bool, str], list[RankView]] = {}
    for rank in view.ranks:
        if rank.failure:
            # What follows from another rank's failure differs in ports and addresses, which help nobody.
            words = _NUMBER.sub("0", rank.failure) if rank.is_consequence else rank.failure
            is_other = rank.rank != view.failed_rank
            grouped.setdefault((is_other, rank.is_consequence, words), []).append(rank)
    groups = [ranks for _, ranks in sorted(grouped.items(), key=lambda item: item[0])]
    lines = []
    for ranks in groups:
        who = in_words.ranks(rank.rank for rank in ranks)
        lines.append((f"{who} (as a consequence)" if ranks[0].is_consequence else who, ranks[0].failure))
    if len(lines) > _NUM_FAILURE_LINES:
        hidden = sum(map(len, groups[_NUM_FAILURE_LINES:]))
        lines = [*lines[:_NUM_FAILURE_LINES], (in_words.count(hidden, "more rank"), "see the logs")]
    if not lines and view.outcome == "failed" and view.message:
        lines = [("job", clean(view.message.strip().partition("\n")[0]))]
    return tuple(lines)


def _metrics(view: JobView) -> str:
    source = next((rank for rank in view.ranks if rank.metrics), None)
    if source is None:
        return ""
    parts = [f"{clean(name)} {_metric(value)}" for name, value in list(source.metrics.items())[:8]]
    step = "" if source.metrics_step is None else f" (step {source.metrics_step:,})"
    return ", ".join(parts) + step


def _metric(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else clean(str(value)[:20])


def _memory(view: JobView) -> str:
    """Memory of all ranks, and of the device of the rank that takes most."""
    parts = []
    taken = view.host_peak_bytes if view.is_over else view.host_bytes
    if taken:
        # Where the system does not tell shared pages, the ranks' numbers can't be added up.
        together = " together" if len(view.ranks) > 1 else ""
        shared = "" if view.is_host_proportional or not together else ", shared pages counted for each"
        parts.append(f"host {in_words.size(taken)}{together}{shared}")
    device = [device_bytes(view, rank) or 0 for rank in view.ranks]
    if any(device):
        parts.append(
            f"device {in_words.size(max(device))}"
            + (f" (rank {device.index(max(device))})" if device[1:] else "")
        )
    return f"{'peak memory' if view.is_over else 'memory'}: {', '.join(parts)}" if parts else ""
