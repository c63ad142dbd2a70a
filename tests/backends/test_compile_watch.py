"""What is said about compilations, from made-up counters."""

from __future__ import annotations

import torch

from nblaunch.backends.xla_runtime import CompileWatch, Counters, describe


class Device:
    """Counters that a test turns on, and what the watch says of them."""

    def __init__(self) -> None:
        self.now = Counters()
        self.notes: list[str] = []
        self.shown: list[bool] = []
        self.facts: dict[str, str] = {}
        self.watch = CompileWatch(
            lambda: self.now, self.notes.append, self.shown.append, self.facts.__setitem__
        )

    def step(
        self, phase: str, shape: tuple[int, ...], graphs: int = 0, s: float = 0.0, **fallbacks: int
    ) -> None:
        self.watch.begin_step(phase, torch.zeros(shape))
        counts = dict(self.now.fallbacks)
        for name, count in fallbacks.items():
            counts[f"aten::{name}"] = counts.get(f"aten::{name}", 0) + count
        self.now = Counters(self.now.num_graphs + graphs, self.now.compile_s + s, counts)


def test_the_first_two_steps_are_told_in_one_line_once() -> None:
    device = Device()
    for _ in range(2):
        device.step("training", (32, 64), 1, 1.5)
    for _ in range(3):
        device.step("training", (32, 64))
    device.watch.end_loop()
    assert device.notes == ["training: 2 graphs compiled in 3.0 s, for batches of 32x64"]
    device.watch.end_loop()
    assert len(device.notes) == 1


def test_a_pass_of_one_step_is_told_at_its_end() -> None:
    device = Device()
    device.step("evaluating", (8,), 1, 0.2)
    device.watch.end_loop()
    assert device.notes == ["evaluating: 1 graph compiled in 0.2 s, for batches of 8"]


def test_a_new_shape_is_told_once_with_the_usual_one() -> None:
    device = Device()
    for rows in (32, 32, 32, 7, 32, 5):
        device.step("training", (rows, 4), int(rows != 32), 0.5 * (rows != 32))
    device.watch.end_loop()
    (note,) = device.notes
    assert note.startswith(
        "training step 4 compiled a new graph in 0.5 s: its batch is 7x4, the others are 32x4. Every shape"
    )


def test_a_shape_seen_before_that_compiles_is_another_cause() -> None:
    device = Device()
    for number in range(5):
        device.step("training", (32, 4), 2 if number == 4 else 0, 3.0 if number == 4 else 0.0)
    device.watch.end_loop()
    (note,) = device.notes
    assert note.startswith(
        "training step 5 compiled 2 new graphs in 3.0 s although its batch is 32x4 as before"
    )


def test_phases_are_told_apart() -> None:
    device = Device()
    for _ in range(3):
        device.step("training", (32, 4))
    device.step("evaluating", (32, 4), 1, 2.0)
    device.step("evaluating", (32, 4))
    device.watch.end_loop()
    assert device.notes == ["evaluating: 1 graph compiled in 2.0 s, for batches of 32x4"]


def test_evaluation_is_compared_with_training() -> None:
    device = Device()
    for rows in (32, 32, 32, 7):
        device.step("training", (rows, 4))
    for _ in range(3):
        device.step("evaluating", (64, 4), 1, 20.5)
    device.watch.end_loop()
    assert device.notes[0] == (
        "evaluating: 2 graphs compiled in 41.0 s, for batches of 64x4, which differ from training's 32x4. Use the same "
        "batch size in both: what they have in common is compiled once then"
    )


def test_the_head_of_the_table_has_all_compilations() -> None:
    device = Device()
    device.step("training", (32,), 1, 1.5)
    device.step("training", (32,), 2, 1.0)
    device.watch.end_step()
    assert device.facts == {"compilations": "3 graphs compiled in 2.5 s"}
    device.step("training", (7,), 1, 0.5)
    device.watch.end_loop()
    assert device.facts == {"compilations": "4 graphs compiled in 3.0 s"}


def test_operations_on_the_cpu_are_named_once() -> None:
    device = Device()
    for _ in range(3):
        device.step("training", (4,), linalg_eig=2, _local_scalar_dense=1)
    device.watch.end_loop()
    assert len(device.notes) == 2
    assert device.notes[0].startswith("a value is read from the device in the middle of a step")
    assert device.notes[1].startswith("aten::linalg_eig runs on the CPU")


def test_what_was_counted_before_the_watch_began_is_not_told() -> None:
    notes: list[str] = []
    counters = Counters(7, 9.0, {"aten::linalg_eig": 3})
    facts: dict[str, str] = {}
    watch = CompileWatch(lambda: counters, notes.append, lambda is_compiling: None, facts.__setitem__)
    watch.begin_step("training", torch.zeros(3))
    watch.end_loop()
    assert (notes, facts) == ([], {})


def test_compiling_is_shown_where_it_is_to_be_expected() -> None:
    device = Device()
    for rows in (32, 32, 32, 7):
        device.step("training", (rows,))
    device.watch.end_loop()
    assert device.shown == [True, False, True, False, False, False, True, False]


def test_batches_are_described_by_their_shapes() -> None:
    batch = {"ids": torch.zeros(2, 3), "rest": [torch.zeros(()), ("text", torch.zeros(4))]}
    assert describe(batch) == "2x3, scalar, 4"
    assert describe("nothing") == "no tensors"
