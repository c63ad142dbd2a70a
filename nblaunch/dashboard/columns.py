"""The table's columns between the state and the detail. A new column needs a row in :data:`COLUMNS`."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import NamedTuple

from nblaunch import formatting
from nblaunch.dashboard.view import JobView, RankView
from nblaunch.formatting import loss, rate, whole_duration

_MEMORY_ALONE_S = 3.0  # seconds after which a job that may never train shows its memory


def furthest_behind(view: JobView) -> RankView:
    """Return the rank with the fewest steps among the running ranks, or among all ranks if none is running."""
    live = [rank for rank in view.ranks if not rank.state.is_final] or list(view.ranks)
    return min(live, key=lambda rank: (rank.epoch, rank.step, rank.rank))


def epoch_of(rank: RankView) -> str:
    """Return ``2/6``, or ``2`` if the number of epochs is unknown; empty before the first epoch."""
    if not rank.epoch:
        return ""
    return f"{rank.epoch}/{rank.num_epochs}" if rank.num_epochs else f"{rank.epoch}"


def _steps(rank: RankView) -> str:
    if rank.total >= 0:
        return f"{rank.step:,}/{rank.total:,}"
    return f"{rank.step:,}" if rank.step else ""


def full_length(steps: str) -> int:
    """Return the length that ``steps`` will have at the end of the loop, when ``7/1,000`` becomes ``1,000/1,000``."""
    _, slash, total = steps.partition("/")
    return 2 * len(total) + 1 if slash else len(steps)


def _rate(per_s: float | None) -> str:
    return "" if per_s is None else rate(per_s) if per_s else "0"


def _eta(left_s: float | None) -> str:
    return "" if left_s is None else whole_duration(left_s)


def _size(num_bytes: int | None) -> str:
    return formatting.size(num_bytes) if num_bytes else ""


def _device(rank: RankView) -> str:
    memory = _size(rank.device_peak_bytes)
    if memory and rank.device_limit_bytes:
        memory = f"{memory} of {formatting.size(rank.device_limit_bytes)}"
    is_shown = rank.device_use is not None and not rank.state.is_final
    return ", ".join(part for part in (memory, f"{rank.device_use:.0%} busy" if is_shown else "") if part)


class WholeJob(NamedTuple):
    """The data for the whole job's row: the job's view, the rank furthest behind, and the seconds until the end."""

    view: JobView
    last: RankView
    left_s: float | None

    def known(self, name: str) -> list[float]:
        """Return the attribute ``name`` of the ranks for which it is known."""
        return [value for rank in self.view.ranks if (value := getattr(rank, name)) is not None]


def _usual_rate(job: WholeJob) -> str:
    rates = job.known("steps_per_s")
    moving = list(filter(None, rates))
    return _rate(median(moving) if moving else 0.0 if rates else None)


def _mean_loss(job: WholeJob) -> str:
    losses = job.known("loss")
    return loss(sum(losses) / len(losses)) if losses else ""


class Column(NamedTuple):
    """A column between the state and the detail.

    Args:
        kind: ``"training"``, ``"memory"`` or ``"device"``; decides when the table shows the column.
        usual_width: number of characters to reserve, so that columns do not move as numbers grow.
        of_rank: returns the text for a rank.
        of_job: returns the text for the whole job.
    """

    kind: str
    usual_width: int
    of_rank: Callable[[RankView], str]
    of_job: Callable[[WholeJob], str]


COLUMNS = {
    "epoch": Column("training", 4, epoch_of, lambda job: epoch_of(job.last)),
    "step": Column("training", 0, _steps, lambda job: _steps(job.last)),
    "steps/s": Column("training", 6, lambda rank: _rate(rank.steps_per_s), _usual_rate),
    "samples/s": Column("training", 8, lambda rank: _rate(rank.samples_per_s),
                        lambda job: _rate(sum(rates) if (rates := job.known("samples_per_s")) else None)),
    "ETA": Column("training", 5, lambda rank: _eta(rank.left_s), lambda job: _eta(job.left_s)),
    "loss": Column("training", 6, lambda rank: "" if rank.loss is None else loss(rank.loss), _mean_loss),
    "peak memory": Column("memory", 8, lambda rank: _size(rank.host_peak_bytes),
                          lambda job: _size(job.view.host_peak_bytes)),
    "peak device": Column("device", 8, _device, lambda job: _size(int(sum(job.known("device_peak_bytes"))))),
}  # fmt: skip


def used_columns(view: JobView) -> tuple[str, ...]:
    """Return the names of the columns. All appear at once, because a later column would move the others."""
    trains = any(rank.has_progress or rank.loss is not None for rank in view.ranks)
    has_memory = any(rank.host_peak_bytes for rank in view.ranks)
    has_device = any(rank.device_peak_bytes or rank.device_use is not None for rank in view.ranks)
    shows = {
        "training": trains,
        "memory": trains or (has_memory and (view.is_over or view.elapsed_s >= _MEMORY_ALONE_S)),
        "device": has_device or (trains and view.start.backend not in ("", "cpu")),
    }
    return tuple(name for name, column in COLUMNS.items() if shows[column.kind])
