"""Reports about ranks that wait for a thread that their process does not have."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import _base as futures

import pytest

from nblaunch.diagnosis import deadlock
from nblaunch.diagnosis.deadlock import DeadlockDetector, advice, explain, is_confirmed
from nblaunch.diagnosis.stacks import Position, StackFrame
from nblaunch.host.waits import Waits

BOOTSTRAP = StackFrame("/x/nblaunch/worker/bootstrap.py", 10, "_call")
CELL = StackFrame("/tmp/ipykernel_1/12.py", 3, "train")
QUEUE = StackFrame(queue.__file__, 171, "get")
THREADING = StackFrame(threading.__file__, 327, "wait")
RESULT = StackFrame(futures.__file__, 451, "result")

Answer = Callable[[Waits | None], None]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Replace the readings about every process."""

    def set_waits(waits: Waits | None) -> None:
        monkeypatch.setattr(deadlock, "endless_waits", lambda pid: waits)

    return set_waits


def position(*inner: StackFrame, num_threads: int | None = 1) -> Position:
    return Position("cell 1, line 3 in train", stack=(*inner, CELL, BOOTSTRAP), num_threads=num_threads)


def test_a_rank_whose_threads_all_wait_is_reported_once(found: Answer) -> None:
    detector = DeadlockDetector()
    found(Waits((7, "0xa", "5"), ()))
    assert [detector.observe(now, {0: 7}) for now in (0.0, 0.5, 1.0, 1.5)] == [{}, {}, {0: True}, {}]


def test_a_thread_that_ran_restarts_the_clock(found: Answer) -> None:
    detector = DeadlockDetector()
    for now, sleeps in ((0.0, "5"), (0.5, "5"), (1.0, "6"), (1.5, "6")):
        found(Waits((7, "0xa", "5"), ((8, "0xb", sleeps),)))
        assert detector.observe(now, {0: 7}) == {}
    assert detector.observe(2.0, {0: 7}) == {0: True}


def test_a_rank_that_continued_is_forgotten(found: Answer) -> None:
    detector = DeadlockDetector()
    found(Waits((7, "0xa", "5"), ()))
    detector.observe(0.0, {0: 7})
    found(None)
    detector.observe(0.9, {0: 7})
    found(Waits((7, "0xa", "5"), ()))
    assert detector.observe(1.4, {0: 7}) == {}


def test_waits_beside_running_threads_are_uncertain(found: Answer) -> None:
    detector = DeadlockDetector()
    found(Waits((7, "0xa", "5"), None))
    assert [detector.observe(now, {0: 7}) for now in (0.0, 1.0, 1.5)] == [{}, {}, {0: False}]


def test_a_wait_without_other_python_threads_is_confirmed() -> None:
    assert is_confirmed(position(THREADING, QUEUE))
    assert not is_confirmed(position(THREADING, QUEUE, num_threads=2))
    assert not is_confirmed(position(THREADING, QUEUE, num_threads=None))
    assert not is_confirmed(position())
    assert not is_confirmed(position(StackFrame("/x/site-packages/polars/frame.py", 1, "collect")))


@pytest.mark.parametrize(
    ("frames", "what"),
    [
        ((THREADING, QUEUE), "a queue"),
        (
            (THREADING, RESULT),
            "a task in a pool",
        ),
        ((THREADING,), "another thread"),
        ((), "another thread"),
        ((StackFrame("/x/site-packages/polars/frame.py", 1, "collect"),), "a thread of polars"),
    ],
)
def test_wait_is_derived_from_library_frames(frames: tuple[StackFrame, ...], what: str) -> None:
    lines = explain({0: position(*frames), 1: position(*frames)})
    assert lines == [f"ranks 0 and 1 wait for {what}, and the worker has no thread that could end the wait."]


def test_the_advice_follows_from_the_start_method() -> None:
    assert "inside the function" in advice("fork")
    assert "acquires twice" in advice("spawn")
