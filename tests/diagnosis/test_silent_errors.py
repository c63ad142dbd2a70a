"""Observations of ranks, which the launcher judges together."""

from __future__ import annotations

from pathlib import Path

import pytest

from nblaunch.diagnosis.silent_errors import SilentErrors
from nblaunch.events import Event, Hint, Note, Observation


def _cleared(rank: int, problem: str = "no optimizer has stepped") -> Observation:
    return Observation(rank, 0.0, "no_optimizer_steps", problem, "Step", 0, None, "finally", is_hint=True)


def test_what_a_later_step_explains_is_withdrawn() -> None:
    for last, num_hints in ((_cleared(1), 1), (_cleared(1, problem=""), 0)):
        emitted: list[Event] = []
        errors = SilentErrors(range(2), emitted.append)
        for observation in (_cleared(0), _cleared(1), last):
            errors.receive(observation)
        errors.collect([0, 1])
        assert not emitted, "a step may follow"
        errors.end()
        assert sum(isinstance(event, Hint) for event in emitted) == num_hints


def test_ranks_that_step_different_parameters_are_not_compared() -> None:
    for subjects, num_notes in ((("weights 1", "weights 1"), 1), (("weights 1", "weights 2"), 0)):
        emitted: list[Event] = []
        errors = SilentErrors(range(2), emitted.append)
        for rank, subject in enumerate(subjects):
            errors.receive(
                Observation(rank, 0.0, "replicas_differ", "they differ", "", 0, (subject, rank / 2), "equal")
            )
        errors.end()
        assert sum(isinstance(event, Note) for event in emitted) == num_notes


def _save(rank: int, path: Path, contents: str | None = "") -> Observation:
    return Observation(
        rank, 0.0, "same_file", "several ranks write the file", "Write it on one rank", 0,
        (str(path), 0, 0, contents), "together", "train.py", 3,
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
    assert "ranks 0 and 1" in str(emitted[0])
    errors.end()
    assert len(emitted) == 1


@pytest.mark.parametrize(("contents", "num_notes"), [(("one", "one"), 0), (("one", "other"), 1)])
def test_ranks_that_write_the_same_are_right_at_any_timing(
    tmp_path: Path, contents: tuple[str, str], num_notes: int
) -> None:
    """What a rank has written is known when it closes the file."""
    emitted: list[Event] = []
    errors = SilentErrors(range(2), emitted.append)
    (tmp_path / "results").write_text("one")
    for rank in range(2):
        errors.receive(_save(rank, tmp_path / "results", None))
    errors.collect([0, 1])
    assert not emitted
    for rank, text in enumerate(contents):
        errors.receive(_save(rank, tmp_path / "results", text))
        errors.collect([0, 1])
    errors.end()
    assert len(emitted) == num_notes


def test_a_file_that_is_never_closed_is_judged_at_the_end(tmp_path: Path) -> None:
    emitted: list[Event] = []
    errors = SilentErrors(range(2), emitted.append)
    (tmp_path / "log").write_text("line")
    for rank in range(2):
        errors.receive(_save(rank, tmp_path / "log", None))
    errors.end()
    assert len(emitted) == 1


def test_an_empty_lock_file_is_not_a_mistake(tmp_path: Path) -> None:
    emitted: list[Event] = []
    errors = SilentErrors(range(2), emitted.append)
    for rank in range(2):
        errors.receive(_save(rank, tmp_path / "lock"))
    (tmp_path / "lock").touch()
    errors.collect([0, 1])
    errors.end()
    assert not emitted
