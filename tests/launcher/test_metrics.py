"""What a job logged, as rows and as a table."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from nblaunch.events import Metric
from nblaunch.launcher.job_state import frame_of, row_of


def _row(step: int | None, attempt: int = 0, rank: int = 0, **values: Any) -> dict[str, Any]:
    return row_of(Metric(rank=rank, time_s=100.0 + (step or 0), step=step, values=values), attempt)


def test_a_row_says_when_and_where() -> None:
    assert _row(3, loss=0.5) == {"step": 3, "time_s": 103.0, "rank": 0, "attempt": 0, "loss": 0.5}
    # A value may be called "step": where no other is given, it is the step.
    for given, shown in ((None, 7), (3, 3)):
        metric = Metric(rank=2, time_s=0.0, step=given, values={"step": 7})
        assert row_of(metric, 1) == {"step": shown, "time_s": 0.0, "rank": 2, "attempt": 1}


def test_a_frame_has_one_row_per_step() -> None:
    frame = frame_of([_row(1, loss=4.0), _row(1, accuracy=0.5), _row(2, loss=3.0), _row(2, loss=2.0)])
    assert list(frame.columns) == ["loss", "accuracy", "time_s"]
    assert (frame.index.name, frame.index.dtype) == ("step", "int64")
    assert frame["loss"].to_dict() == {1: 4.0, 2: 2.0}
    assert frame["accuracy"].isna().tolist() == [False, True]


def test_rows_without_a_step_are_kept_apart() -> None:
    frame = frame_of([_row(None, lr=1.0), _row(None, lr=2.0), _row(1, lr=3.0)])
    assert frame["lr"].tolist() == [1.0, 2.0, 3.0]
    assert frame.index.isna().tolist() == [True, True, False]


def test_attempts_and_ranks_are_distinguished_where_there_are_several() -> None:
    frame = frame_of([_row(1, loss=1.0), _row(1, attempt=1, loss=2.0), _row(1, attempt=1, rank=3, loss=3.0)])
    assert list(frame.columns) == ["loss", "rank", "attempt", "time_s"]
    assert frame["loss"].tolist() == [1.0, 2.0, 3.0]


def test_nothing_logged_is_an_empty_frame() -> None:
    frame = frame_of([])
    assert frame.empty
    assert list(frame.columns) == ["time_s"]


def test_without_pandas_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install pandas\).* job\.metrics"):
        frame_of([])
