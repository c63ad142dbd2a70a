"""Detecting a stall, and interpreting the ranks' stacks."""

from __future__ import annotations

import pytest

from nblaunch.diagnosis.hang import advice, describe_hang
from nblaunch.diagnosis.stacks import Position, position_of
from nblaunch.training.collectives import operations
from nblaunch.wire.outbox import Outbox
from nblaunch.worker import output
from nblaunch.worker.delivery import Delivery

TORCH = "/usr/lib/python3/site-packages/torch"


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
                (f"{TORCH}/distributed/distributed_c10d.py", 9, "all_gather_into_tensor"),
                (operations.__file__, 8, operations.gather.__name__),
            ],
            "gather",
        ),
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
                ("/site/nblaunch/training/checkpoints/save_round.py", 9, "arrive"),
                ("/site/nblaunch/training/checkpoints/save_state.py", 9, "save"),
                ("/site/nblaunch/training/checkpoints/save_state.py", 9, "save_state"),
            ],
            "save_state",
        ),
        ([("/usr/lib/python3.11/threading.py", 9, "wait")], ""),
        ([], ""),
    ],
)
def test_waits_are_recognised_by_their_frames(
    frames: list[tuple[str, int, str]], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nblaunch.diagnosis.stacks.is_user_file", lambda name: name.startswith("/home/"))
    position = position_of(dump(*frames, ("/home/me/train.py", 14, "train"), BOOTSTRAP))
    assert position.waiting_in == expected
    assert position.where == "/home/me/train.py, line 14 in train"


@pytest.mark.parametrize(
    ("frames", "is_long_work"),
    [
        ([(f"{TORCH}/_inductor/compile_fx.py", 9, "compile_fx")], True),
        ([(f"{TORCH}/serialization.py", 9, "_save")], True),
        ([(f"{TORCH}/_dynamo/eval_frame.py", 9, "_fn")], False),  # on the stack of all compiled code
        (
            [
                (f"{TORCH}/distributed/distributed_c10d.py", 9, "barrier"),
                ("/site/nblaunch/training/checkpoints/save_state.py", 5, "save"),
            ],
            False,
        ),
    ],
    ids=["compiles", "saves", "runs what was compiled", "waits for the rank that saves"],
)
def test_long_work_is_recognised(
    frames: list[tuple[str, int, str]], is_long_work: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nblaunch.diagnosis.stacks.is_user_file", lambda name: name.startswith("/home/"))
    text = dump(*frames, ("/home/me/train.py", 14, "train"), BOOTSTRAP)
    assert position_of(text).is_long_work == is_long_work


def test_only_library_imports_count_as_importing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nblaunch.diagnosis.stacks.is_user_file", lambda name: name.startswith("/home/"))
    frames = [
        (f"{TORCH}/__init__.py", 9, "<module>"),
        ("<frozen importlib._bootstrap>", 241, "_call_with_frames_removed"),
        ("/home/me/train.py", 14, "train"),
        BOOTSTRAP,
    ]
    position = position_of(dump(*frames))
    assert position is not None
    assert position.is_importing
    position = position_of(dump(("/home/me/model.py", 3, "<module>"), *frames[1:]))
    assert position is not None
    assert not position.is_importing


def test_position_uses_the_function_thread() -> None:
    text = dump(("/home/me/other.py", 3, "helper")) + dump(
        ("/home/me/train.py", 14, "train"), BOOTSTRAP, thread="Thread"
    )
    position = position_of(text)
    assert position is not None
    assert position.where == "/home/me/train.py, line 14 in train"


def test_the_forking_cell_is_not_the_position() -> None:
    """Below the bootstrap, a forked worker's stack has the kernel's frames."""
    cell = ("/tmp/ipykernel_1/2.py", 4, "<module>")
    fork = ("/site/nblaunch/start_methods/fork.py", 70, "fork_workers")
    starting = position_of(dump((output.__file__, 9, "capture"), BOOTSTRAP, fork, cell))
    assert starting == Position("outside the function")
    running = position_of(dump(("/home/me/train.py", 14, "train"), BOOTSTRAP, fork, cell))
    assert running is not None
    assert "/home/me/train.py" in running.where


def test_a_single_threads_stack_is_read() -> None:
    text = dump(("/home/me/train.py", 14, "train"), BOOTSTRAP)
    alone = text.replace("Current thread 0x00007f0000000001 (most", "Stack (most")
    assert alone != text
    assert position_of(alone) == position_of(text)


def test_sending_is_distinguished_from_the_function() -> None:
    text = dump(
        ("/home/me/train.py", 6, "__reduce__"),
        ("/site/nblaunch/wire/pickling/payload.py", 50, "append"),
        ("/site/nblaunch/wire/outbox.py", 60, Outbox.put_value.__name__),
        BOOTSTRAP,
    )
    position = position_of(text)
    assert position is not None
    assert position.where == (
        "the function has returned, and its return value is being pickled: /home/me/train.py, line 6 in __reduce__"
    )
    text = dump(
        ("/home/me/train.py", 6, "state_dict"),
        ("/site/nblaunch/worker/delivery.py", 60, Delivery._put_weights.__name__),
        BOOTSTRAP,
    )
    assert position_of(text).where == (
        "the function has returned, and trained weights are being sent: /home/me/train.py, line 6 in state_dict"
    )


def test_no_reply_is_reported_as_none() -> None:
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
                "ranks 0 and 2: waiting in all_reduce, train.py, line 14",
                "rank 1: train.py, line 9: while not ready",
                "ranks 0 and 2 wait for rank 1, which has not entered the collective.",
            ],
        ),
        (
            {0: waits("all_reduce", 14), 1: BUSY, 2: BUSY},
            {},
            [],
            [
                "rank 0: waiting in all_reduce, train.py, line 14",
                "ranks 1 and 2: train.py, line 9: while not ready",
                "rank 0 waits for ranks 1 and 2, which have not entered the collective.",
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
                "The ranks have processed different numbers of batches (rank 0: 5, rank 1: 4).",
            ],
        ),
        (
            {0: waits("backward", 14)},
            {0: 5, 1: 4},
            [1],
            [
                "rank 0: waiting in backward, train.py, line 14",
                "rank 1 called sys.exit(0), so the others will wait forever. Check that all ranks see the same "
                "number of batches.",
            ],
        ),
        (
            {0: Position("train.py, line 3", "the data loader"), 1: waits("barrier", 4)},
            {},
            [],
            [
                "rank 0: waiting in the data loader, train.py, line 3",
                "rank 1: waiting in barrier, train.py, line 4",
                "rank 1 waits for rank 0, which has not entered the collective.",
            ],
        ),
        ({0: BUSY, 1: BUSY}, {}, [], ["ranks 0 and 1: train.py, line 9: while not ready"]),
        (
            {0: waits("barrier", 3), 1: waits("barrier", 3)},
            {0: 1, 1: 1},
            [],
            ["ranks 0 and 1: waiting in barrier, train.py, line 3"],
        ),
    ],
    ids=[
        "absent",
        "several absent",
        "different",
        "unequal",
        "gone",
        "in the loader",
        "no rank waits",
        "all wait alike",
    ],
)
def test_stack_shapes_are_distinguished(
    positions: dict[int, Position], steps: dict[int, int], gone: list[int], lines: list[str]
) -> None:
    assert describe_hang(positions, steps, dict.fromkeys(gone, "called sys.exit(0)")) == lines


@pytest.mark.parametrize("waits", [True, False])
def test_advice_is_about_collectives_only_if_a_rank_waits_in_one(waits: bool) -> None:
    waiting = [(f"{TORCH}/distributed/distributed_c10d.py", 9, "barrier")] if waits else []
    positions = {0: position_of(dump(*waiting, ("train.py", 3, "train"), BOOTSTRAP))}
    assert ("collectives" in advice(positions), "accelerator.progress" in advice(positions)) == (
        waits,
        not waits,
    )
    assert "hang_timeout_s" in advice(positions)
