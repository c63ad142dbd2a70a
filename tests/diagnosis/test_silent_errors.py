"""Observations of ranks, which the launcher judges together."""

from __future__ import annotations

from pathlib import Path

import pytest

from nblaunch.diagnosis.silent_errors import SilentErrors
from nblaunch.events import Event, Note, Observation

pytestmark = pytest.mark.timeout(60)


def _save(rank: int, path: Path) -> Observation:
    return Observation(
        rank, 0.0, "same_file", "several ranks write the file", "Write it on one rank", 0, (str(path), 0, 0),
        "together", "train.py", 3,
    )  # fmt: skip


def test_a_file_that_is_still_empty_is_judged_when_it_is_written(tmp_path: Path) -> None:
    """Ranks report a save when it begins."""
    emitted: list[Event] = []
    errors = SilentErrors(range(2), emitted.append)
    for rank in range(2):
        errors.receive(_save(rank, tmp_path / "weights.pt"))
    errors.collect([0, 1])
    assert not emitted
    (tmp_path / "weights.pt").write_bytes(b"weights")
    errors.collect([0, 1])
    assert [type(event) for event in emitted] == [Note]
    assert "ranks 0-1" in str(emitted[0])
    errors.end()
    assert len(emitted) == 1


def test_a_lock_file_that_stays_empty_is_no_mistake(tmp_path: Path) -> None:
    emitted: list[Event] = []
    errors = SilentErrors(range(2), emitted.append)
    for rank in range(2):
        errors.receive(_save(rank, tmp_path / "lock"))
    (tmp_path / "lock").touch()
    errors.collect([0, 1])
    errors.end()
    assert not emitted
