"""The table of epochs: the training loss, what was logged, and the time of each.

epoch  training loss  accuracy  time
    1         0.4127     0.912  12 s
    2         0.2034     0.951  11 s
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nblaunch.dashboard.view import EpochView, JobView
from nblaunch.formatting import duration, loss, single_line

LIVE_ROWS = 8
"""Largest number of last epochs in the table while a job runs."""

UNKNOWN_ROWS = 4
"""Number of last epochs in it where the number of epochs is unknown."""

_ALL_ROWS = 30  # when it has ended
_NUM_METRICS = 8


@dataclass(frozen=True)
class EpochTable:
    """The table of epochs as text cells.

    Args:
        columns: their names.
        rows: the last epochs, oldest first; a cell per column.
        num_free: rows that are still to come, so that the table keeps its height while the job runs.
        note: below the table of an ended job, if there are more epochs.
    """

    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    num_free: int = 0
    note: str = ""


def tabulate_epochs(view: JobView) -> EpochTable:
    """Return the table of epochs; an empty one if there are neither losses nor metrics.

    While the job runs, it has its column of losses and all its rows from the first loss on: nothing moves later. The
    row after the last epoch that has ended is that of the running one, which explains a table without values.
    """
    epochs = sorted(view.epochs.items())
    names = metrics_of_epochs(view)
    has_loss = any(epoch.loss is not None for _, epoch in epochs)
    if not view.is_over:
        has_loss = has_loss or any(rank.epoch and rank.loss is not None for rank in view.ranks)
    if not has_loss and not names:
        return EpochTable()
    most = _ALL_ROWS if view.is_over else _num_live_rows(view)
    shown = epochs[-most:]
    running = 0 if view.is_over else max((rank.epoch for rank in view.ranks), default=0)
    if len(shown) < most and running > max(view.epochs, default=0):
        shown.append((running, EpochView(view.attempt)))
    rows = [
        _row(number, epoch, names, has_loss=has_loss, is_running=number == running) for number, epoch in shown
    ]
    return EpochTable(
        columns=("epoch", *(["training loss"] if has_loss else []), *map(single_line, names), "time"),
        rows=tuple(rows),
        num_free=0 if view.is_over else most - len(rows),
        note="earlier epochs are not shown" if view.is_over and len(epochs) > len(shown) else "",
    )


def metrics_of_epochs(view: JobView) -> tuple[str, ...]:
    """Return the names of the metrics in the table of epochs, in the order in which they were first logged."""
    names = dict.fromkeys(name for _, epoch in sorted(view.epochs.items()) for name in epoch.metrics)
    return tuple(names)[:_NUM_METRICS]


def _num_live_rows(view: JobView) -> int:
    expected = max((rank.num_epochs for rank in view.ranks), default=0)
    return min(expected, LIVE_ROWS) or UNKNOWN_ROWS


def _row(
    number: int, epoch: EpochView, names: Sequence[str], *, has_loss: bool, is_running: bool
) -> tuple[str, ...]:
    training = [] if not has_loss else ["" if epoch.loss is None else loss(epoch.loss)]
    values = [_value(epoch.metrics[name]) if name in epoch.metrics else "" for name in names]
    time = duration(epoch.duration_s) if epoch.duration_s else "running" if is_running else ""
    return (str(number), *training, *values, time)


def _value(value: object) -> str:
    return loss(value) if isinstance(value, float) else single_line(str(value)[:20])
