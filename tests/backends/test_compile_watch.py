"""What is reported about compilations, from made-up counters."""

from __future__ import annotations

from collections.abc import Hashable

import torch

from nblaunch.backends.compile_watch import COLLECTIVE, CompileWatch, Counters, OptimizerStep, describe


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
        self,
        phase: str,
        shape: tuple[int, ...],
        graphs: int = 0,
        s: float = 0.0,
        *,
        reads: int = 0,
        scalars: int = 0,
        marks: tuple[Hashable, ...] = (),
        **fallbacks: int,
    ) -> None:
        self.watch.begin_step(phase, torch.zeros(shape))
        for mark in marks:
            self.watch.mark(mark)
        self.count(graphs, s, reads, scalars, **fallbacks)

    def count(
        self, graphs: int = 0, s: float = 0.0, reads: int = 0, scalars: int = 0, **fallbacks: int
    ) -> None:
        """Counts, in the current step or between two."""
        now, counts = self.now, dict(self.now.fallbacks)
        for name, count in fallbacks.items():
            counts[f"aten::{name}"] = counts.get(f"aten::{name}", 0) + count
        self.now = Counters(
            now.num_graphs + graphs,
            now.compile_s + s,
            counts,
            now.num_reads + reads + scalars,
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


def test_phases_are_distinguished() -> None:
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
        device.step("training", (4,), linalg_eig=2)
    device.watch.end_loop()
    (note,) = device.notes
    assert note.startswith("aten::linalg_eig runs on the CPU")


def test_a_value_that_is_read_in_every_step_is_named_once() -> None:
    device = Device()
    for _ in range(5):
        device.step("training", (4,), scalars=1)
    device.watch.end_loop()
    (note,) = device.notes
    assert note.startswith("a value is read from the device in every step")


def test_what_is_read_now_and_then_or_between_loops_is_nothing_to_report() -> None:
    device = Device()
    for epoch in range(3):
        for number in range(6):
            device.step("training", (4,), 1 if epoch == 0 and number < 2 else 0, reads=int(number == 3))
        device.watch.end_loop()
        device.count(graphs=1, s=1.0, scalars=4)
    (note,) = device.notes
    assert note == "training: 2 graphs compiled in 0.0 s, for batches of 4"


def test_what_is_read_after_a_break_is_no_steps() -> None:
    device = Device()
    for epoch in range(4):
        for number in range(4):
            device.step("evaluating", (4,), 1 if epoch == 0 and number < 2 else 0)
        device.watch.leave()
        device.count(graphs=1, s=1.0, scalars=1)
    assert [note for note in device.notes if "new graph" in note or "read" in note] == []


def test_a_read_that_cuts_a_graph_is_named() -> None:
    device = Device()
    for number in range(6):
        device.step("training", (4,), 2 if number == 5 else 0, 1.0, reads=int(number == 5))
    device.watch.end_loop()
    (note,) = device.notes
    assert note.startswith(
        "training step 6 compiled 2 new graphs in 1.0 s: a value is read from the device in it"
    )


def test_what_is_computed_and_read_at_times_after_the_program_is_nothing_to_report() -> None:
    device = Device()
    for number in range(9):
        device.step("training", (4,), int(number < 2), 1.0)
        device.watch.cut()
        device.count(int(number == 5), scalars=int(number in (5, 7)))
    device.watch.end_loop()
    assert device.notes == ["training: 2 graphs compiled in 2.0 s, for batches of 4"]


def test_what_is_compiled_anew_at_every_such_read_is_named() -> None:
    device = Device()
    for number in range(20):
        device.step("training", (4,), int(number < 2), 1.0)
        device.watch.cut()
        device.count(int(number % 4 == 3), 0.1, scalars=int(number % 4 == 3))
    assert "something else in the loop changes from step to step" in device.notes[-1]
    assert len(device.notes) == 2


def test_reads_of_collectives_are_not_the_users() -> None:
    device = Device()
    for _ in range(6):
        device.step("evaluating", (4,), reads=3, marks=(COLLECTIVE,))
    device.watch.end_loop()
    assert device.notes == []


def test_steps_of_another_kind_have_graphs_of_their_own() -> None:
    """Four micro-steps to a window: the first, those after it, and the last; the optimizer's state appears late."""
    device = Device()
    for window in range(4):
        for micro in range(4):
            marks: tuple[Hashable, ...] = ((micro == 0, micro == 3),)
            if micro == 3:
                marks += (OptimizerStep(1, 2, 0 if window == 0 else 2),)
            is_new = (window == 0 and micro != 2) or (window == 1 and micro == 3)
            device.step("training", (4,), int(is_new), 1.0, marks=marks)
    device.watch.end_loop()
    assert [note for note in device.notes if "new graph" in note] == []
    assert device.facts == {"compilations": "4 graphs compiled in 8.0 s"}


def test_the_last_batch_that_is_cut_is_no_cause() -> None:
    device = Device()
    for _ in range(2):
        for number in range(5):
            device.step(
                "evaluating", (4,), int(number == 4), 0.1, marks=(("real rows", 2),) if number == 4 else ()
            )
        device.watch.end_loop()
    assert [note for note in device.notes if "new graph" in note] == []


def test_new_state_of_an_optimizer_is_named() -> None:
    device = Device()
    for number in range(8):
        num_states = (0, 2, 2, 2, 2, 4, 4, 4)[number]
        device.step("training", (4,), int(number in (0, 1, 5)), 1.0, marks=(OptimizerStep(1, 4, num_states),))
    device.watch.end_loop()
    assert device.notes[1].startswith(
        "training step 6 compiled a new graph in 1.0 s: an optimizer is new, or has"
    )
    assert len(device.notes) == 2


def test_what_was_counted_before_the_watch_began_is_not_reported() -> None:
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
