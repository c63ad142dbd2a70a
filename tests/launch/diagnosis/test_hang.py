"""Seeing a standstill, and reading what the ranks' stacks say about it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nblaunch.launch.diagnosis.hang import Mark, Position, Watchdog, describe_hang, position_of
from nblaunch.wire.outbox import Outbox
from nblaunch.worker.delivery import Delivery

TORCH = "/usr/lib/python3/site-packages/torch"


def quiet(progress: int = 0, cpu_s: float | None = 0.0) -> Mark:
    return Mark((progress,), cpu_s)


def test_a_standstill_is_reported_once() -> None:
    watchdog = Watchdog(10.0)
    assert [watchdog.observe(now, {0: quiet()}) for now in (0.0, 9.9, 10.0, 11.0, 500.0)] == [
        False,
        False,
        True,
        False,
        False,
    ]


def test_progress_starts_the_clock_again() -> None:
    watchdog = Watchdog(10.0)
    watchdog.observe(0.0, {0: quiet(1)})
    assert not watchdog.observe(9.0, {0: quiet(2)})
    assert not watchdog.observe(18.9, {0: quiet(2)})
    assert watchdog.observe(19.0, {0: quiet(2)})
    assert not watchdog.observe(20.0, {0: quiet(3)})
    assert watchdog.observe(30.0, {0: quiet(3)})


def test_another_rank_that_joins_the_standstill_is_news() -> None:
    watchdog = Watchdog(10.0)
    watchdog.observe(0.0, {0: quiet(), 1: quiet()})
    watchdog.observe(5.0, {0: quiet(), 1: quiet(1)})
    assert watchdog.observe(10.0, {0: quiet(), 1: quiet(1)})
    assert watchdog.observe(15.0, {0: quiet(), 1: quiet(1)})
    assert not watchdog.observe(16.0, {0: quiet(), 1: quiet(1)})


def test_a_rank_that_computes_is_not_quiet() -> None:
    watchdog = Watchdog(10.0)
    for now in range(100):
        assert not watchdog.observe(float(now), {0: quiet(cpu_s=now * 0.5)})


def test_a_long_silent_computation_does_not_hide_the_standstill_after_it() -> None:
    watchdog = Watchdog(10.0)
    for now in range(3600):
        assert not watchdog.observe(float(now), {0: quiet(cpu_s=float(now))})
    assert any(watchdog.observe(3600.0 + now, {0: quiet(cpu_s=3600.0)}) for now in range(12))


def test_a_little_work_of_a_hung_rank_is_not_reported_as_a_new_standstill() -> None:
    watchdog = Watchdog(10.0)
    reports = [watchdog.observe(float(now), {0: quiet(cpu_s=now * 0.01)}) for now in range(1000)]
    assert reports.count(True) == 1


def test_threads_that_only_wake_to_look_around_do_not_count_as_work() -> None:
    watchdog = Watchdog(10.0)
    watchdog.observe(0.0, {0: quiet(cpu_s=3.0)})
    assert watchdog.observe(10.0, {0: quiet(cpu_s=3.1)})


@pytest.mark.parametrize("known", [(None, None), (None, 1.0), (1.0, None)])
def test_where_processor_time_is_unknown_silence_is_enough(known: tuple[float | None, float | None]) -> None:
    watchdog = Watchdog(10.0)
    watchdog.observe(0.0, {0: quiet(cpu_s=known[0])})
    assert watchdog.observe(10.0, {0: quiet(cpu_s=known[1])})


def test_a_rank_that_ended_is_forgotten() -> None:
    watchdog = Watchdog(10.0)
    watchdog.observe(0.0, {0: quiet(), 1: quiet()})
    assert not watchdog.observe(20.0, {})


@given(st.lists(st.floats(0.01, 9.9), min_size=1, max_size=50))
def test_whoever_moves_often_enough_never_hangs(gaps_s: list[float]) -> None:
    watchdog = Watchdog(10.0)
    now = 0.0
    for step, gap_s in enumerate(gaps_s):
        assert not watchdog.observe(now, {0: quiet(step)})
        now += gap_s
        assert not watchdog.observe(now, {0: quiet(step)})


def dump(*frames: tuple[str, int, str], thread: str = "Current thread") -> str:
    lines = [f'  File "{file}", line {line} in {name}' for file, line, name in frames]
    return "\n".join([f"{thread} 0x00007f0000000001 (most recent call first):", *lines, ""])


BOOTSTRAP = ("/site/nblaunch/worker/bootstrap.py", 100, "_call")


@pytest.mark.parametrize(
    ("frames", "expected"),
    [
        (
            [
                (f"{TORCH}/distributed/distributed_c10d.py", 9, "all_reduce"),
                (f"{TORCH}/distributed/c10d_logger.py", 8, "wrapper"),
            ],
            "all_reduce",
        ),
        ([(f"{TORCH}/distributed/distributed_c10d.py", 9, "barrier")], "barrier"),
        (
            [
                (f"{TORCH}/utils/data/dataloader.py", 9, "_try_get_data"),
                ("/usr/lib/python3/queue.py", 3, "get"),
            ],
            "the data loader",
        ),
        (
            [
                (f"{TORCH}/autograd/graph.py", 9, "_engine_run_backward"),
                (f"{TORCH}/_tensor.py", 2, "backward"),
            ],
            "backward",
        ),
        (
            [
                ("/usr/lib/python3.11/threading.py", 9, "wait"),
                ("/site/nblaunch/training/checkpoints/rendezvous.py", 9, "arrive"),
                ("/site/nblaunch/training/checkpoints/saving.py", 9, "save"),
                ("/site/nblaunch/training/checkpoints/checkpointer.py", 9, "save_state"),
            ],
            "save_state",
        ),
        ([("/usr/lib/python3.11/threading.py", 9, "wait")], ""),
        ([], ""),
    ],
)
def test_what_a_rank_waits_in(
    frames: list[tuple[str, int, str]], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "nblaunch.launch.diagnosis.stacks.is_user_file", lambda name: name.startswith("/home/")
    )
    position = position_of(dump(*frames, ("/home/me/train.py", 14, "train"), BOOTSTRAP))
    assert position.waiting_in == expected
    assert position.where == "/home/me/train.py, line 14 in train"


def test_the_thread_of_the_function_counts_and_not_the_one_that_was_interrupted() -> None:
    text = dump(("/home/me/other.py", 3, "helper")) + dump(
        ("/home/me/train.py", 14, "train"), BOOTSTRAP, thread="Thread"
    )
    position = position_of(text)
    assert position is not None
    assert position.where == "/home/me/train.py, line 14 in train"


def test_what_is_sent_after_the_function_is_told_from_the_function() -> None:
    text = dump(
        ("/home/me/train.py", 6, "__reduce__"),
        ("/site/nblaunch/wire/payload.py", 50, "append"),
        ("/site/nblaunch/wire/outbox.py", 60, Outbox.put_value.__name__),
        BOOTSTRAP,
    )
    position = position_of(text)
    assert position is not None
    assert position.where == (
        "the function has returned, and what it returned is being pickled: /home/me/train.py, line 6 in __reduce__"
    )
    text = dump(
        ("/home/me/train.py", 6, "state_dict"),
        ("/site/nblaunch/worker/delivery.py", 60, Delivery._put_weights.__name__),
        BOOTSTRAP,
    )
    assert position_of(text).where == (
        "the function has returned, and trained weights are being sent: /home/me/train.py, line 6 in state_dict"
    )


def test_no_answer_is_said_to_be_none() -> None:
    assert position_of("") is None


def waits(name: str, line: int) -> Position:
    return Position(f"train.py, line {line}", name)


BUSY = Position("train.py, line 9: while not ready")


@pytest.mark.parametrize(
    ("positions", "steps", "gone", "lines"),
    [
        (
            {0: waits("all_reduce", 14), 1: BUSY, 2: waits("all_reduce", 14)},
            {},
            [],
            [
                "ranks 0, 2: waiting in all_reduce, train.py, line 14",
                "rank 1: train.py, line 9: while not ready",
                "ranks 0, 2 wait for rank 1, which has not entered the collective.",
            ],
        ),
        (
            {0: waits("all_reduce", 14), 1: BUSY, 2: BUSY},
            {},
            [],
            [
                "rank 0: waiting in all_reduce, train.py, line 14",
                "ranks 1-2: train.py, line 9: while not ready",
                "rank 0 waits for ranks 1-2, which have not entered the collective.",
            ],
        ),
        (
            {0: waits("all_reduce", 14), 1: waits("barrier", 20)},
            {0: 3, 1: 3},
            [],
            [
                "rank 0: waiting in all_reduce, train.py, line 14",
                "rank 1: waiting in barrier, train.py, line 20",
                "The ranks are in different collectives: every rank must call the same ones in the same order.",
            ],
        ),
        (
            {0: waits("backward", 14), 1: waits("barrier", 20)},
            {0: 5, 1: 4},
            [],
            [
                "rank 0: waiting in backward, train.py, line 14",
                "rank 1: waiting in barrier, train.py, line 20",
                "The ranks have taken unequal numbers of batches (rank 0: 5, rank 1: 4).",
            ],
        ),
        (
            {0: waits("backward", 14)},
            {0: 5, 1: 4},
            [1],
            [
                "rank 0: waiting in backward, train.py, line 14",
                "rank 1 returned already, so the others wait for ever: do all ranks see equally many batches?",
            ],
        ),
        ({0: BUSY, 1: BUSY}, {}, [], ["ranks 0-1: train.py, line 9: while not ready"]),
        (
            {0: waits("barrier", 3), 1: waits("barrier", 3)},
            {0: 1, 1: 1},
            [],
            ["ranks 0-1: waiting in barrier, train.py, line 3"],
        ),
    ],
    ids=["absent", "several absent", "different", "unequal", "gone", "nobody waits", "all wait alike"],
)
def test_shapes_are_told_apart(
    positions: dict[int, Position], steps: dict[int, int], gone: list[int], lines: list[str]
) -> None:
    assert describe_hang(positions, steps, gone) == lines
