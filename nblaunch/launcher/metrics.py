"""What a job has logged, as rows and as a table: ``job.metrics`` and ``job.metrics_frame()``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from nblaunch.events import Metric

if TYPE_CHECKING:
    import pandas

_ABOUT = ("step", "time_s", "rank", "attempt")


def row_of(metric: Metric, attempt: int) -> dict[str, Any]:
    """Return a call of ``accelerator.log`` as a row: step, wall clock in seconds, rank, attempt, values by name.

    A value that is called as one of these takes its place, except that a step given to ``log`` is the step.
    """
    about = {"step": metric.step, "time_s": metric.time_s, "rank": metric.rank, "attempt": attempt}
    return {**about, **metric.values, **({} if metric.step is None else {"step": metric.step})}


def frame_of(rows: Iterable[Mapping[str, Any]]) -> pandas.DataFrame:
    """Return a table with one row per step and one column per value, in the order in which they came.

    Values that were logged for a step in several calls share its row. The index is the step; rows without one are not
    joined, and have no number there. The last column is ``time_s``, of the row's last call; before it stand ``rank``
    and ``attempt`` where there is more than one.

    Raises:
        ImportError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError as error:
        raise ImportError(
            "metrics_frame needs pandas (pip install pandas); job.metrics has the same as a list of dicts"
        ) from error
    joined = _joined(rows)
    names = dict.fromkeys(name for row in joined for name in row if name not in _ABOUT)
    several = [name for name in ("rank", "attempt") if len({row[name] for row in joined}) > 1]
    steps = [row["step"] for row in joined]
    is_counted = all(isinstance(step, int) for step in steps)
    index = pandas.Index(steps, name="step", dtype="int64" if is_counted else "float64")
    return pandas.DataFrame(joined, columns=[*names, *several, "time_s"], index=index)


def _joined(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join the rows of a step, where its first one stood."""
    joined: dict[Any, dict[str, Any]] = {}
    for number, row in enumerate(rows):
        is_counted = row["step"] is not None
        key = ("step", row["attempt"], row["rank"], row["step"]) if is_counted else ("row", number)
        joined.setdefault(key, {}).update(row)
    return list(joined.values())
