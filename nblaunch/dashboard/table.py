"""All text that is shown of a job, without layout: rows, headline, failures, notices, memory.

Text, HTML and widgets draw the same table, so that they show the same numbers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from nblaunch import formatting
from nblaunch.dashboard.epochs import EpochTable, metrics_of_epochs, tabulate_epochs
from nblaunch.dashboard.notices import Notice, as_of_now, notices
from nblaunch.dashboard.rows import Row, Tile, rows_of
from nblaunch.dashboard.view import JobView, RankView
from nblaunch.formatting import duration, single_line, whole_duration

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
        columns: as in :class:`nblaunch.dashboard.rows.Rows`; so are the next four.
        rows: the whole job, and ranks with rows of their own.
        collapsed: ranks in lockstep, in words.
        expanded: rows of all ranks, behind the collapsed line.
        tiles: all ranks, behind the collapsed line.
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
    collapsed: str
    expanded: tuple[Row, ...]
    tiles: tuple[Tile, ...]
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
    rows = rows_of(view, found)
    notes = [note for note in view.notes if note not in view.warnings]
    return Table(
        name=view.function_name or "job",
        headline=headline(view),
        setting=_setting(view),
        fallback=view.fallback,
        columns=rows.columns,
        rows=rows.rows,
        collapsed=rows.collapsed,
        expanded=rows.expanded,
        tiles=rows.tiles,
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
    device = [(rank.device_peak_bytes if view.is_over else rank.device_bytes) or 0 for rank in view.ranks]
    if any(device):
        parts.append(
            f"device {formatting.size(max(device))}"
            + (f" (rank {device.index(max(device))})" if device[1:] else "")
        )
    return f"{'peak memory' if view.is_over else 'memory'}: {', '.join(parts)}" if parts else ""
