"""What a table about a job says, as words and numbers, before anybody draws it.

Owns the choice of columns and rows, the wording and the formatting of numbers, so that text, HTML and widgets can't
disagree. Knows no markup and no widths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite

from nblaunch.dashboard.view import JobView, RankView, clean
from nblaunch.events import WorkerState

MAX_ROWS = 16
"""Up to so many processes each has its row; of more, the extremes are shown and the rest is summed up."""

HEAD_LINES = 500
"""Lines of a rank that a blocking cell shows as they come; what lies beyond is folded, see ``lines.py``."""

_NUM_SLOWEST, _NUM_FASTEST, _NUM_FAILED = 4, 3, 6
_NUM_FAILURE_LINES = 4
_NUM_NOTES = 5


@dataclass(frozen=True)
class Row:
    """One line of a table. ``rank`` is None for the line that sums up ranks without their own.

    Args:
        rank: whose; None for a summary.
        label: what stands in the rank column.
        state: what it does; decides the colour.
        state_text: what it does, in words.
        cells: one text per column of the table; empty where there is nothing to say.
        fraction: done part of the pass, 0 to 1, or None.
        loss_history: points of a sparkline.
        detail: progress bar of the worker, or how it ended.
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
class Table:
    """All that is said about a job.

    Args:
        name: the function that runs.
        headline: how the job is doing, in words.
        setting: number of processes, backend, start method.
        columns: names of the columns between the state and the detail; only those with something in them.
        rows: one per shown rank, perhaps one that sums up the others.
        failures: ``(who, what)``, root cause first.
        metrics: the last logged values, one line; may be empty.
        notes: from the launcher and the workers.
        log_dir: where complete logs are; may be empty.
    """

    name: str
    headline: str
    setting: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    failures: tuple[tuple[str, str], ...]
    metrics: str
    notes: tuple[str, ...]
    log_dir: str


def tabulate(view: JobView) -> Table:
    """The table for ``view``."""
    shown, others = select_ranks(view)
    rows = [_row(rank) for rank in shown]
    if others:
        rows.append(_summary_row(others))
    used = [index for index in range(len(_COLUMNS)) if any(row.cells[index] for row in rows)]
    return Table(
        name=view.function_name or "job",
        headline=headline(view),
        setting=_setting(view),
        columns=tuple(_COLUMNS[index] for index in used),
        rows=tuple(_keep(row, used) for row in rows),
        failures=_failures(view),
        metrics=_metrics(view),
        notes=tuple(_note(rank, text) for rank, text in view.notes[-_NUM_NOTES:]),
        log_dir=view.log_dir,
    )


# --- numbers -------------------------------------------------------------------------------------------------------


def duration(seconds: float) -> str:
    """``0.03 s``, ``1.2 s``, ``12 s``, ``3:07``, ``1:02:03``."""
    if not isfinite(seconds) or seconds > 1e8:
        return "?"
    if seconds < 0.995:
        return f"{seconds:.2f} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def whole_duration(seconds: float) -> str:
    """The same in whole seconds, for times that are read while they change: ``0 s``, ``12 s``, ``3:07``."""
    return f"{seconds:.0f} s" if seconds < 9.5 else duration(seconds)


def rate(per_s: float) -> str:
    """About three digits: ``0.083``, ``3.21``, ``38.2``, ``1,240``."""
    if per_s >= 99.95:
        return f"{per_s:,.0f}"
    return f"{per_s:.1f}" if per_s >= 9.995 else f"{per_s:.2f}" if per_s >= 0.995 else f"{per_s:.3f}"


def loss(value: float) -> str:
    """Four digits where a loss usually lies, so that numbers stay aligned: ``0.5321``, ``12.04``, ``3.1e-05``."""
    if not isfinite(value):
        return str(value)
    size = abs(value)
    if size != 0 and (size < 1e-3 or size >= 1e5):
        return f"{value:.1e}"
    return f"{value:.4f}" if size < 10 else f"{value:.2f}" if size < 1000 else f"{value:.0f}"


def count(number: int, noun: str) -> str:
    """``1 process``, ``4 processes``."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}es" if noun.endswith("s") else f"{number:,} {noun}s"


# --- words ---------------------------------------------------------------------------------------------------------

_OUTCOMES = {"done": "done in", "failed": "failed after", "interrupted": "interrupted after"}


def headline(view: JobView) -> str:
    """How the job is doing: ``running for 12 s``, ``done in 3:07``, ``failed in rank 2 after 0.83 s``."""
    if not view.is_started:
        return "starting" if not view.is_over else "not started"
    if view.is_over:
        is_of_rank = view.outcome == "failed" and view.failed_rank is not None
        words = (
            f"failed in rank {view.failed_rank} after"
            if is_of_rank
            else _OUTCOMES.get(view.outcome, "cancelled after")
        )
        return f"{words} {duration(view.elapsed_s)}"
    # Whole seconds while it runs: the table is published only when what it says changes.
    return f"running for {whole_duration(int(view.elapsed_s))}"


def state_text(rank: RankView) -> str:
    return rank.state.name.lower()


def _setting(view: JobView) -> str:
    how = ", ".join(part for part in (view.backend, view.start_method) if part)
    text = count(view.num_processes, "process") + (f" ({how})" if how else "")
    if view.attempt:
        text += f", attempt {view.attempt + 1}"
    samples_per_s = sum(rank.samples_per_s or 0.0 for rank in view.ranks if not rank.state.is_final)
    return f"{text}, {rate(samples_per_s)} samples/s" if samples_per_s > 0 else text


def _note(rank: int, text: str) -> str:
    return text if rank < 0 else f"rank {rank}: {text}"


def _failures(view: JobView) -> tuple[tuple[str, str], ...]:
    """Root cause first; the same words of several ranks once; what follows from the root cause last."""
    grouped: dict[tuple[bool, bool, str], list[int]] = {}
    for rank in view.ranks:
        if rank.failure:
            is_other = rank.rank != view.failed_rank
            grouped.setdefault((is_other, rank.is_consequence, rank.failure), []).append(rank.rank)
    lines = [
        (who(ranks) + (" (as a consequence)" if is_consequence else ""), text)
        for (_, is_consequence, text), ranks in sorted(grouped.items())
    ]
    if len(lines) > _NUM_FAILURE_LINES:
        hidden = sum(len(ranks) for _, ranks in sorted(grouped.items())[_NUM_FAILURE_LINES:])
        lines = [*lines[:_NUM_FAILURE_LINES], (count(hidden, "more rank"), "see the logs")]
    if not lines and view.outcome == "failed" and view.message:
        lines = [("job", clean(view.message.strip().partition("\n")[0]))]
    return tuple(lines)


def who(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0, 2, 5-63``."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    parts = []
    for first, last in spans:
        parts += [str(first)] if first == last else [f"{first}-{last}"]
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(parts)


def _metrics(view: JobView) -> str:
    source = next((rank for rank in view.ranks if rank.metrics), None)
    if source is None:
        return ""
    parts = [f"{clean(name)} {_metric(value)}" for name, value in list(source.metrics.items())[:8]]
    step = "" if source.metrics_step is None else f" (step {source.metrics_step:,})"
    return ", ".join(parts) + step


def _metric(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else clean(str(value)[:20])


# --- rows ----------------------------------------------------------------------------------------------------------

_COLUMNS = ("epoch", "step", "steps/s", "left", "loss")


def _row(rank: RankView) -> Row:
    return Row(
        rank=rank.rank,
        label=str(rank.rank),
        state=rank.state,
        state_text=state_text(rank),
        cells=(
            f"{rank.epoch}" if rank.epoch else "",
            _steps(rank),
            rate(rank.steps_per_s) if rank.steps_per_s else "",
            "" if rank.left_s is None else whole_duration(rank.left_s),
            "" if rank.loss is None else loss(rank.loss),
        ),
        fraction=rank.fraction,
        loss_history=rank.loss_history,
        detail=_detail(rank),
    )


def _steps(rank: RankView) -> str:
    if rank.total >= 0:
        return f"{rank.step:,}/{rank.total:,}"
    return f"{rank.step:,}" if rank.step else ""


def _detail(rank: RankView) -> str:
    if rank.exit_status is not None and rank.exit_status.code not in (0, 1):
        return str(rank.exit_status)
    if rank.state.is_final:
        return ""
    # Lines stand in the cell already, unless this rank prints so much that they are folded there.
    return rank.status_line or (rank.last_line if rank.num_lines > HEAD_LINES else "")


def _keep(row: Row, used: Sequence[int]) -> Row:
    cells = tuple(row.cells[index] for index in used)
    return Row(
        row.rank, row.label, row.state, row.state_text, cells, row.fraction, row.loss_history, row.detail
    )


def select_ranks(view: JobView) -> tuple[list[RankView], list[RankView]]:
    """Ranks that get a row, and the others. Beyond :data:`MAX_ROWS`: the failed, the slowest, the fastest, rank 0."""
    if len(view.ranks) <= MAX_ROWS:
        return list(view.ranks), []
    failed = [rank for rank in view.ranks if rank.state is WorkerState.FAILED]
    failed.sort(key=lambda rank: (rank.rank != view.failed_rank, rank.is_consequence, rank.rank))
    by_progress = sorted(view.ranks, key=lambda rank: (rank.epoch, rank.step, rank.state, -rank.rank))
    chosen = [*failed[:_NUM_FAILED], *by_progress[:_NUM_SLOWEST], view.ranks[0], *by_progress[-_NUM_FASTEST:]]
    shown = list(dict.fromkeys(rank.rank for rank in chosen))
    rest = set(range(len(view.ranks))) - set(shown)
    return [view.ranks[rank] for rank in shown], [view.ranks[rank] for rank in sorted(rest)]


def _summary_row(ranks: Sequence[RankView]) -> Row:
    states: dict[WorkerState, int] = {}
    for rank in ranks:
        states[rank.state] = states.get(rank.state, 0) + 1
    words = [f"{number} {state.name.lower()}" for state, number in sorted(states.items())]
    most = max(states, key=lambda state: states[state])
    text = most.name.lower() if len(states) == 1 else ", ".join(words)
    return Row(
        rank=None,
        label=f"{len(ranks)} others",
        state=most,
        state_text=text,
        cells=(
            _span([rank.epoch for rank in ranks if rank.epoch], lambda epoch: f"{epoch}"),
            _span([rank.step for rank in ranks if rank.has_progress], lambda step: f"{step:,}"),
            _span([rank.steps_per_s for rank in ranks if rank.steps_per_s], rate),
            "",
            _span([rank.loss for rank in ranks if rank.loss is not None and isfinite(rank.loss)], loss),
        ),
    )


def _span(values: Sequence[float], form: Callable[[float], str]) -> str:
    if not values:
        return ""
    low, high = form(min(values)), form(max(values))
    return low if low == high else f"{low}–{high}"
