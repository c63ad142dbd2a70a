"""Reports about compilations, from simulated counters."""

from __future__ import annotations

import torch

from nblaunch.backends.base import Reporters
from nblaunch.backends.compile_watch import CompileWatch, Counters, describe


class Device:
    """Counters that a test advances, and the watch's reports about them."""

    def __init__(self) -> None:
        self.now = Counters()
        self.notes: list[str] = []
        self.shown: list[bool] = []
        self.facts: dict[str, str] = {}
        reporters = Reporters(self.notes.append, self.shown.append, self.facts.__setitem__)
        self.watch = CompileWatch(lambda: self.now, reporters)

    def step(
        self,
        phase: str,
        shape: tuple[int, ...],
        graphs: int = 0,
        s: float = 0.0,
        *,
        scalars: int = 0,
        **fallbacks: int,
    ) -> None:
        self.watch.begin_step(phase, torch.zeros(shape))
        self.count(graphs, s, scalars, **fallbacks)

    def count(self, graphs: int = 0, s: float = 0.0, scalars: int = 0, **fallbacks: int) -> None:
        """Advance counters, in the current step or between two steps."""
        now, counts = self.now, dict(self.now.fallbacks)
        for name, count in fallbacks.items():
            counts[f"aten::{name}"] = counts.get(f"aten::{name}", 0) + count
        self.now = Counters(
            now.num_graphs + graphs,
            now.compile_s + s,
            counts,
            now.num_scalars + scalars,
        )


def test_the_first_two_steps_are_reported_in_one_line_once() -> None:
    device = Device()
    for _ in range(2):
        device.step("training", (32, 64), 1, 1.5)
    for _ in range(3):
        device.step("training", (32, 64))
    device.watch.end_loop()
    assert device.notes == ["training: 2 graphs compiled in 3.0 s, for batches of 32x64"]
    device.watch.end_loop()
    assert len(device.notes) == 1


def test_a_pass_of_one_step_is_reported_at_its_end() -> None:
    device = Device()
    device.step("evaluating", (8,), 1, 0.2)
    device.watch.end_loop()
    assert device.notes == ["evaluating: 1 graph compiled in 0.2 s, for batches of 8"]


def test_a_new_shape_is_reported_once_with_the_usual_one() -> None:
    device = Device()
    for rows in (32, 32, 32, 7, 32, 5):
        device.step("training", (rows, 4), int(rows != 32), 0.5 * (rows != 32))
    device.watch.end_loop()
    (note,) = device.notes
    assert note.startswith(
        "training step 4 compiled 1 new graph in 0.5 s: its batch is 7x4, but the others are 32x4. Every new shape"
    )


def test_repeated_compilation_of_one_shape_is_reported() -> None:
    device = Device()
    for number in range(40):
        device.step("training", (32, 4), int(number % 3 == 0), 3.0 * (number % 3 == 0))
    device.watch.end_loop()
    assert device.notes[1].startswith(
        "training: 10 steps compiled new graphs although the batch shape did not change (the last took 3.0 s)"
    )
    assert len(device.notes) == 2


def test_phases_are_distinguished() -> None:
    device = Device()
    for _ in range(3):
        device.step("training", (32, 4))
    device.step("evaluating", (32, 4), 1, 2.0)
    device.step("evaluating", (32, 4))
    device.watch.end_loop()
    assert device.notes == ["evaluating: 1 graph compiled in 2.0 s, for batches of 32x4"]


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
        device.step("training", (4,), linalg_eig=2)
    device.watch.end_loop()
    (note,) = device.notes
    assert note.startswith("aten::linalg_eig runs on the CPU")


def test_a_value_read_in_every_step_is_named_once() -> None:
    device = Device()
    for _ in range(5):
        device.step("training", (4,), scalars=1)
    device.watch.end_loop()
    (note,) = device.notes
    assert note.startswith("every step reads a value from the device")


def test_occasional_reads_are_not_reported() -> None:
    device = Device()
    for epoch in range(3):
        for number in range(6):
            device.step("training", (4,), 1 if epoch == 0 and number < 2 else 0, scalars=int(number == 3))
        device.watch.end_loop()
        device.count(graphs=1, s=1.0, scalars=4)
    (note,) = device.notes
    assert note == "training: 2 graphs compiled in 0.0 s, for batches of 4"


def test_reads_after_a_break_are_not_steps() -> None:
    device = Device()
    for epoch in range(4):
        for number in range(4):
            device.step("evaluating", (4,), 1 if epoch == 0 and number < 2 else 0)
        device.watch.leave()
        device.count(graphs=1, s=1.0, scalars=1)
    assert [note for note in device.notes if "new graph" in note or "read" in note] == []


def test_a_few_recompiled_steps_are_not_reported() -> None:
    """For example, steps that end an accumulation window, and the first step after an optimizer has created its
    state.
    """
    device = Device()
    for number in range(16):
        device.step("training", (4,), int(number in (0, 1, 3, 7)), 1.0 * (number in (0, 1, 3, 7)))
    device.watch.end_loop()
    assert device.notes == ["training: 2 graphs compiled in 2.0 s, for batches of 4"]
    assert device.facts == {"compilations": "4 graphs compiled in 4.0 s"}


def test_counts_before_the_watch_are_not_reported() -> None:
    notes: list[str] = []
    counters = Counters(7, 9.0, {"aten::linalg_eig": 3})
    facts: dict[str, str] = {}
    watch = CompileWatch(lambda: counters, Reporters(note=notes.append, fact=facts.__setitem__))
    watch.begin_step("training", torch.zeros(3))
    watch.end_loop()
    assert (notes, facts) == ([], {})


def test_expected_compilations_are_shown() -> None:
    device = Device()
    for rows in (32, 32, 32, 7):
        device.step("training", (rows,))
    device.watch.end_loop()
    assert device.shown == [True, False, True, False, False, False, True, False]


def test_batches_are_described_by_their_shapes() -> None:
    batch = {"ids": torch.zeros(2, 3), "rest": [torch.zeros(()), ("text", torch.zeros(4))]}
    assert describe(batch) == "2x3, scalar, 4"
    assert describe("nothing") == "no tensors"
