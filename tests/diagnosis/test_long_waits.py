"""Reports about ranks that wait for a thread that their process does not have, or for a reader of a queue."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import _base as futures
from dataclasses import replace
from multiprocessing import queues

import pytest

from nblaunch.diagnosis import long_waits
from nblaunch.diagnosis.long_waits import WaitDetector, WaitKind, advice, explain, is_confirmed
from nblaunch.diagnosis.stacks import NO_REPLY, Position, StackFrame
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
        monkeypatch.setattr(long_waits, "endless_waits", lambda pid: waits)
        monkeypatch.setattr(long_waits, "wait_for_others", lambda pid: None)

    return set_waits


def position(*inner: StackFrame, num_threads: int | None = 1) -> Position:
    return Position("cell 1, line 3 in train", stack=(*inner, CELL, BOOTSTRAP), num_threads=num_threads)


def test_a_rank_whose_threads_all_wait_is_reported_once(found: Answer) -> None:
    detector = WaitDetector()
    found(Waits((7, "0xa", "5"), ()))
    assert [detector.observe(now, {0: 7}) for now in (0.0, 0.5, 1.0, 1.5)] == [
        {},
        {},
        {0: WaitKind.THREAD},
        {},
    ]


def test_a_thread_that_ran_restarts_the_clock(found: Answer) -> None:
    detector = WaitDetector()
    for now, sleeps in ((0.0, "5"), (0.5, "5"), (1.0, "6"), (1.5, "6")):
        found(Waits((7, "0xa", "5"), ((8, "0xb", sleeps),)))
        assert detector.observe(now, {0: 7}) == {}
    assert detector.observe(2.0, {0: 7}) == {0: WaitKind.THREAD}


def test_a_rank_that_continued_is_forgotten(found: Answer) -> None:
    detector = WaitDetector()
    found(Waits((7, "0xa", "5"), ()))
    detector.observe(0.0, {0: 7})
    found(None)
    detector.observe(0.9, {0: 7})
    found(Waits((7, "0xa", "5"), ()))
    assert detector.observe(1.4, {0: 7}) == {}


def test_waits_beside_running_threads_are_uncertain(found: Answer) -> None:
    detector = WaitDetector()
    found(Waits((7, "0xa", "5"), None))
    assert [detector.observe(now, {0: 7}) for now in (0.0, 1.0, 1.5)] == [
        {},
        {},
        {0: WaitKind.THREAD_PERHAPS},
    ]


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_wait_for_a_reader_counts_if_the_kernel_has_the_pipe(
    found: Answer, monkeypatch: pytest.MonkeyPatch, is_shared: bool
) -> None:
    detector = WaitDetector()
    found(None)
    monkeypatch.setattr(long_waits, "wait_for_others", lambda pid: (7, "0x3", "5"))
    monkeypatch.setattr(long_waits, "has_awaited_object", lambda pid: is_shared)
    kinds = [detector.observe(now, {0: 7}) for now in (0.0, 1.0, 2.0, 3.0)]
    assert kinds == [{}, {}, {0: WaitKind.READER} if is_shared else {}, {}]


def test_stacks_confirm_waits() -> None:
    waiting, busy = position(THREADING, QUEUE), position()
    assert is_confirmed(WaitKind.THREAD_PERHAPS, waiting)
    assert not is_confirmed(WaitKind.THREAD_PERHAPS, position(THREADING, QUEUE, num_threads=2))
    assert not is_confirmed(WaitKind.THREAD_PERHAPS, position(THREADING, QUEUE, num_threads=None))
    assert not is_confirmed(WaitKind.THREAD_PERHAPS, busy)
    assert not is_confirmed(
        WaitKind.THREAD_PERHAPS, position(StackFrame("/x/site-packages/polars/frame.py", 1, "collect"))
    )
    assert is_confirmed(WaitKind.THREAD, busy)
    assert not is_confirmed(WaitKind.THREAD, NO_REPLY)
    assert not is_confirmed(WaitKind.THREAD, replace(waiting, waiting_in="all_reduce"))
    assert is_confirmed(WaitKind.READER, position(StackFrame(queues.__file__, 90, "put")))
    assert not is_confirmed(WaitKind.READER, waiting)


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
