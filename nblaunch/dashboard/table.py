"""The table of a job as text cells, without layout: columns, rows, headline, failures, memory.

Text, HTML and widgets draw the same table, so that they show the same numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from nblaunch import formatting
from nblaunch.dashboard.epochs import EpochTable, metrics_of_epochs, tabulate_epochs
from nblaunch.dashboard.notices import Notice, notices
from nblaunch.dashboard.stall import as_of_now, stall_text
from nblaunch.dashboard.view import JobView, RankView
from nblaunch.events import WorkerState
from nblaunch.formatting import duration, loss, percent, rate, single_line, whole_duration

MAX_ROWS = 16
"""Largest number of rows. With more processes, the extremes have a row and a summary row stands for the others."""

HEAD_LINES = 500
"""Number of lines of a rank that a cell prints at once; further lines are folded, see ``lines.py``."""

GRID_COLUMNS = 8
"""Ranks per line in the grid of ranks without a row."""

_NUM_FAILED, _NUM_NOTICED, _NUM_SLOWEST, _NUM_FASTEST = 6, 3, 3, 3


@dataclass(frozen=True)
class Row:
    """A row of the table: one rank, or a summary of the ranks without a row.

    Args:
        rank: None for a summary.
        label: text of the rank column.
        state: decides the colour.
        state_text: text of the state column.
        cells: one text per column of the table; may be empty.
        fraction: progress of the loop, 0 to 1, or None.
        loss_history: points of a sparkline.
        detail: the worker's progress bar as text, or its last line, or its exit status.
    """

    rank: int | None
    label: str
    state: WorkerState
    state_text: str
    cells: tuple[str, ...]
    fraction: float | None = None
    loss_history: tuple[float, ...] = ()
    detail: str = ""


@dataclass(frozen=True)
class GridCell:
    """A cell of the grid of ranks without a row.

    Args:
        rank: of the worker.
        state: decides the colour.
        text: progress or state: ``"45%"``, ``"waiting"``, ``"done"``.
        fraction: progress of the loop, 0 to 1, or None.
    """

    rank: int
    state: WorkerState
    text: str
    fraction: float | None = None


def state_text(rank: RankView) -> str:
    """Return the state in one word: ``starting``, ``training``, ``waiting`` (in a collective), ``killed``, ..."""
    return "killed" if rank.is_killed else rank.state.name.lower()


def columns_of(view: JobView) -> tuple[str, ...]:
    """Return the names of all columns."""
    memory = ("peak memory", "peak device") if view.is_over else ("memory", "device")
    return ("epoch", "step", "steps/s", "samples/s", "ETA", "loss", *memory)


def row_of(view: JobView, rank: RankView) -> Row:
    """Return the row of one rank."""
    stalled = stall_text(view, rank)
    return Row(
        rank=rank.rank,
        label=str(rank.rank),
        state=WorkerState.WAITING if stalled else rank.state,
        state_text=stalled or state_text(rank),
        cells=(
            epoch_of(rank),
            _steps(rank),
            _rate(rank.steps_per_s),
            _rate(rank.samples_per_s),
            "" if rank.left_s is None else whole_duration(rank.left_s),
            "" if rank.loss is None else loss(rank.loss),
            _size(_host_bytes(view, rank)),
            _device(view, rank),
        ),
        fraction=_fraction(rank),
        loss_history=rank.loss_history,
        detail=_detail(rank),
    )


def _fraction(rank: RankView) -> float | None:
    """Return the progress of the rank's loader, or of its own progress bar if it has no loader."""
    if rank.fraction is None and not rank.has_progress and rank.bar is not None:
        return rank.bar.fraction
    return rank.fraction


def _rate(per_s: float | None) -> str:
    return "" if per_s is None else rate(per_s) if per_s else "0"


def _host_bytes(view: JobView, rank: RankView) -> int | None:
    return rank.host_peak_bytes if view.is_over else rank.host_bytes


def device_bytes(view: JobView, rank: RankView) -> int | None:
    """Return the device memory of a rank: current, or peak when the job is over."""
    return rank.device_peak_bytes if view.is_over else rank.device_bytes


def _size(num_bytes: int | None) -> str:
    return formatting.size(num_bytes) if num_bytes else ""


def _device(view: JobView, rank: RankView) -> str:
    taken = _size(device_bytes(view, rank))
    if taken and rank.device_limit_bytes:
        taken = f"{taken} of {formatting.size(rank.device_limit_bytes)}"
    is_shown = rank.device_use is not None and not rank.state.is_final
    return ", ".join(part for part in (taken, f"{rank.device_use:.0%} busy" if is_shown else "") if part)


def epoch_of(rank: RankView) -> str:
    """Return ``2/6``, ``2`` where the number of epochs is unknown, or nothing before the first."""
    if not rank.epoch:
        return ""
    return f"{rank.epoch}/{rank.num_epochs}" if rank.num_epochs else f"{rank.epoch}"


def _steps(rank: RankView) -> str:
    if rank.total >= 0:
        return f"{rank.step:,}/{rank.total:,}"
    return f"{rank.step:,}" if rank.step else ""


def _detail(rank: RankView) -> str:
    if rank.exit_status is not None and rank.exit_status.code not in (0, 1):
        return str(rank.exit_status)
    if rank.state.is_final:
        return ""
    if rank.bar is not None:
        return rank.bar.text
    # The cell shows printed lines below the table, unless this rank prints so much that they are folded.
    return rank.status_line or (rank.last_line if rank.num_lines > HEAD_LINES else "")


def narrowed(row: Row, used: Sequence[int]) -> Row:
    """Return the row with the cells at the indices ``used``."""
    cells = tuple(row.cells[index] for index in used)
    return Row(
        row.rank, row.label, row.state, row.state_text, cells, row.fraction, row.loss_history, row.detail
    )


def select_ranks(view: JobView) -> tuple[list[RankView], list[RankView]]:
    """Return the ranks that have a row, and the others.

    If there are more than :data:`MAX_ROWS`: failed ranks, ranks with a notice, the slowest, rank 0, the fastest.
    """
    if len(view.ranks) <= MAX_ROWS:
        return list(view.ranks), []
    failed = [rank for rank in view.ranks if rank.state is WorkerState.FAILED]
    failed.sort(key=lambda rank: (rank.rank != view.failed_rank, rank.is_consequence, rank.rank))
    noticed = [view.ranks[rank] for notice in notices(view) for rank in notice.ranks]
    by_progress = _by_progress(view)
    chosen = [
        *failed[:_NUM_FAILED],
        *noticed[:_NUM_NOTICED],
        *by_progress[:_NUM_SLOWEST],
        view.ranks[0],
        *by_progress[-_NUM_FASTEST:],
    ]
    shown = list(dict.fromkeys(rank.rank for rank in chosen))
    rest = set(range(len(view.ranks))) - set(shown)
    return [view.ranks[rank] for rank in shown], [view.ranks[rank] for rank in sorted(rest)]


def _by_progress(view: JobView) -> list[RankView]:
    """Return ranks, the slowest first; by rank if all are within one step, since that order changes all the time."""
    steps = [rank.steps_done for rank in view.ranks]
    if 0 < max(steps) <= min(steps) + 1:
        return list(view.ranks)
    return sorted(view.ranks, key=lambda rank: (rank.epoch, rank.step, rank.state, rank.rank))


def grid_cell(rank: RankView) -> GridCell:
    """Return the grid cell of a rank without a row."""
    fraction = _fraction(rank)
    is_moving = rank.state in (WorkerState.TRAINING, WorkerState.EVALUATING, WorkerState.RUNNING)
    text = percent(fraction) if is_moving and fraction is not None else state_text(rank)
    return GridCell(rank.rank, rank.state, text, fraction)


def summary_row(view: JobView, ranks: Sequence[RankView]) -> Row:
    """Return the summary row of ``ranks``."""
    states: dict[WorkerState, int] = {}
    for rank in ranks:
        states[rank.state] = states.get(rank.state, 0) + 1
    counts = [f"{number} {state.name.lower()}" for state, number in sorted(states.items())]
    most = max(states, key=lambda state: states[state])
    text = most.name.lower() if len(states) == 1 else ", ".join(counts)
    return Row(
        rank=None,
        label=f"{len(ranks)} others",
        state=most,
        state_text=text,
        cells=(
            _span([rank.epoch for rank in ranks if rank.epoch], lambda epoch: f"{epoch}"),
            _span([rank.step for rank in ranks if rank.has_progress], lambda step: f"{step:,}"),
            _span([rank.steps_per_s for rank in ranks if rank.steps_per_s], rate),
            _span([rank.samples_per_s for rank in ranks if rank.samples_per_s], rate),
            "",
            _span([rank.loss for rank in ranks if rank.loss is not None and isfinite(rank.loss)], loss),
            _span([taken for rank in ranks if (taken := _host_bytes(view, rank))], formatting.size),
            _span([taken for rank in ranks if (taken := device_bytes(view, rank))], formatting.size),
        ),
    )


def _span(values: Sequence[float], form: Callable[[float], str]) -> str:
    if not values:
        return ""
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low}–{high}"


_NUM_FAILURE_LINES = 4
_NUM_NOTES = 5
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Table:
    """All text that is shown of a job.

    Args:
        name: of the function that runs.
        headline: state of the job: ``running for 12 s``.
        setting: number of processes, backend, start method.
        fallback: why the start method is not the usual one; empty if it is.
        columns: names of the columns between state and detail; empty columns are left out.
        rows: one per shown rank, and a summary if there are others.
        grid: the ranks without a row, by rank; :data:`GRID_COLUMNS` per line.
        failures: ``(ranks, failure)``, root cause first.
        notices: slow and stalled ranks, losses that are not finite.
        epochs: losses and metrics of each epoch.
        metrics: the last logged values in one line, if they are not all in ``epochs``; may be empty.
        memory: memory of the job in one line; may be empty.
        warnings: of the launcher and the workers.
        notes: of the launcher and the workers, without the warnings.
        log_dir: folder of complete logs; may be empty.
    """

    name: str
    headline: str
    setting: str
    fallback: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    grid: tuple[GridCell, ...]
    failures: tuple[tuple[str, str], ...]
    notices: tuple[Notice, ...]
    epochs: EpochTable
    metrics: str
    memory: str
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    log_dir: str


def tabulate(view: JobView) -> Table:
    """Return the table of a job."""
    found = notices(view)
    view = as_of_now(view)
    shown, others = select_ranks(view)
    rows = [row_of(view, rank) for rank in shown]
    if others:
        rows.append(summary_row(view, others))
    columns = columns_of(view)
    # A column that comes and goes would move the others: the time left is unknown now and then.
    has_eta = not view.is_over and any(rank.total > 0 for rank in view.ranks)
    used = [
        index
        for index, name in enumerate(columns)
        if any(row.cells[index] for row in rows) or (name == "ETA" and has_eta)
    ]
    notes = [note for note in view.notes if note not in view.warnings]
    return Table(
        name=view.function_name or "job",
        headline=headline(view),
        setting=_setting(view),
        fallback=view.fallback,
        columns=tuple(columns[index] for index in used),
        rows=tuple(narrowed(row, used) for row in rows),
        grid=tuple(grid_cell(rank) for rank in others),
        failures=_failures(view),
        notices=found,
        epochs=tabulate_epochs(view),
        metrics=_metrics(view),
        memory=_memory(view),
        warnings=tuple(_note(rank, text) for rank, text in view.warnings),
        notes=tuple(_note(rank, text) for rank, text in notes[-_NUM_NOTES:]),
        log_dir=view.log_dir,
    )


# --- text ----------------------------------------------------------------------------------------------------------

_OUTCOMES = {"done": "done in", "failed": "failed after", "interrupted": "interrupted after"}


def headline(view: JobView) -> str:
    """Return the state of the job: ``running for 12 s``, ``done in 3:07``, ``failed in rank 2 after 0.83 s``."""
    if not view.is_started:
        return "starting" if not view.is_over else "not started"
    if view.is_over:
        if view.outcome == "done" and view.is_early:
            return f"stopped early on request after {duration(view.elapsed_s)}"
        is_of_rank = view.outcome == "failed" and view.failed_rank is not None
        outcome = (
            f"failed in rank {view.failed_rank} after"
            if is_of_rank
            else _OUTCOMES.get(view.outcome, "cancelled after")
        )
        return f"{outcome} {duration(view.elapsed_s)}"
    # Whole seconds while it runs, because a table is published only when its text has changed.
    return f"running for {whole_duration(int(view.elapsed_s))}"


def _setting(view: JobView) -> str:
    facts = dict(view.facts)
    precision = facts.pop(
        "precision", view.mixed_precision
    )  # reported by workers, where it differs from the setting
    spanning = "spmd" if view.is_spmd else ""
    parts = (view.backend, view.start_method, spanning, precision, *facts.values())
    how = ", ".join(part for part in parts if part)
    text = formatting.count(view.num_processes, "process") + (f" ({how})" if how else "")
    if view.attempt:
        text += f", attempt {view.attempt + 1}"
    samples_per_s = sum(rank.samples_per_s or 0.0 for rank in view.ranks if not rank.state.is_final)
    text += f", {rate(samples_per_s)} samples/s" if samples_per_s > 0 else ""
    # Of the current loop: how many a function has is unknown.
    return text if view.left_s is None else f"{text}, ETA {whole_duration(view.left_s)}"


def _note(rank: int, text: str) -> str:
    return text if rank < 0 else f"rank {rank}: {text}"


def _failures(view: JobView) -> tuple[tuple[str, str], ...]:
    """Return failures with the root cause first and its consequences last; equal failures of several ranks once."""
    grouped: dict[tuple[bool, bool, str], list[RankView]] = {}
    for rank in view.ranks:
        if rank.failure:
            # Consequences of another rank's failure differ only in ports and addresses.
            text = _NUMBER.sub("0", rank.failure) if rank.is_consequence else rank.failure
            is_other = rank.rank != view.failed_rank
            grouped.setdefault((is_other, rank.is_consequence, text), []).append(rank)
    groups = [ranks for _, ranks in sorted(grouped.items(), key=lambda item: item[0])]
    lines = []
    for ranks in groups:
        who = formatting.ranks(rank.rank for rank in ranks)
        lines.append((f"{who} (secondary failure)" if ranks[0].is_consequence else who, ranks[0].failure))
    if len(lines) > _NUM_FAILURE_LINES:
        hidden = sum(map(len, groups[_NUM_FAILURE_LINES:]))
        lines = [*lines[:_NUM_FAILURE_LINES], (formatting.count(hidden, "more rank"), "see the logs")]
    if not lines and view.outcome == "failed" and view.message:
        lines = [("job", single_line(view.message.strip().partition("\n")[0]))]
    return tuple(lines)


def _metrics(view: JobView) -> str:
    source = next((rank for rank in view.ranks if rank.metrics), None)
    if source is None or source.metrics.keys() <= set(metrics_of_epochs(view)):
        return ""
    parts = [f"{single_line(name)} {_metric(value)}" for name, value in list(source.metrics.items())[:8]]
    step = "" if source.metrics_step is None else f" (step {source.metrics_step:,})"
    return ", ".join(parts) + step


def _metric(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else single_line(str(value)[:20])


def _memory(view: JobView) -> str:
    """Return host memory of all ranks, and device memory of the rank with most of it."""
    parts = []
    taken = view.host_peak_bytes if view.is_over else view.host_bytes
    if taken:
        # Where shared pages are counted for each process, the sum is too large.
        together = " together" if len(view.ranks) > 1 else ""
        shared = "" if view.is_host_proportional or not together else ", shared pages counted for each"
        parts.append(f"host {formatting.size(taken)}{together}{shared}")
    device = [device_bytes(view, rank) or 0 for rank in view.ranks]
    if any(device):
        parts.append(
            f"device {formatting.size(max(device))}"
            + (f" (rank {device.index(max(device))})" if device[1:] else "")
        )
    return f"{'peak memory' if view.is_over else 'memory'}: {', '.join(parts)}" if parts else ""
