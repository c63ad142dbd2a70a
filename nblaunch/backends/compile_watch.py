"""Reports which step of a loop made a lazy device compile, and why.

A lazy device compiles a step's graph during the first steps, and again whenever the graph changes: because of another
input shape, another branch, or a value that is read in the middle of the step. Each compilation takes seconds to
minutes and looks like a hang. This module therefore reports it, once per cause, with the step, the shapes and the time.

A correct loop may need several graphs: for steps inside an accumulation window, for steps after the optimizer has
created its state, and for the last batch. The module therefore reports later compilations only if there are many.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nblaunch import formatting
from nblaunch.backends.base import Reporters, tensors

WARM_UP_STEPS = 2
"""Number of steps that compile for a new shape: two, because the first creates some of the second's inputs."""

_READING_STEPS = 3  # in a row, because an occasional read is not worth a report
_CHANGING_STEPS = 10  # more than the number of graphs that a correct loop needs


@dataclass(frozen=True)
class Counters:
    """The compiler's counters at a point in time, counted since the start of the process.

    Args:
        num_graphs: number of compiled graphs.
        compile_s: seconds spent compiling.
        fallbacks: operation -> number of times it ran on the CPU because the device does not support it.
        num_scalars: number of device tensors that were read as Python numbers.
    """

    num_graphs: int = 0
    compile_s: float = 0.0
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    num_scalars: int = 0


@dataclass
class _Phase:
    """Steps with a common name, such as "training": number of steps for each shape, and what they compiled."""

    shapes: collections.Counter[str] = field(default_factory=collections.Counter)
    num_steps: int = 0
    num_graphs: int = 0  # compiled by its first steps
    compile_s: float = 0.0
    is_reported: bool = False
    num_reading_steps: int = 0  # in a row
    num_late_steps: int = 0  # steps that compiled although their shapes were known


class CompileWatch:
    """Watches the steps of one process.

    Args:
        read: returns the current counters.
        reporters: receive the reports.
    """

    def __init__(self, read: Callable[[], Counters], reporters: Reporters) -> None:
        self._read = read
        self._reporters = reporters
        self._phases: dict[str, _Phase] = {}
        self._before = self._first = read()
        self._open: tuple[str, str] | None = None
        self._reported: set[str] = set()

    def begin_step(self, phase: str, batch: Any) -> None:
        """End the previous step and begin a step of ``phase`` on ``batch``."""
        self.end_step()
        self._before = self._read()
        shapes = describe(batch)
        steps = self._phases.setdefault(phase, _Phase())
        steps.num_steps += 1
        steps.shapes[shapes] += 1
        self._open = (phase, shapes)
        self._reporters.compiling(steps.shapes[shapes] <= WARM_UP_STEPS)

    def leave(self) -> None:
        """Forget the current step, because its loop ended in the middle of it."""
        if self._open is not None:
            self._open = None
            self._reporters.compiling(False)

    def end_step(self) -> None:
        """Report what the current step has compiled, if there is a current step."""
        if self._open is None:
            return
        (phase, shapes), self._open = self._open, None
        now = self._read()
        self._reporters.compiling(False)
        num_graphs = now.num_graphs - self._before.num_graphs
        if num_graphs:
            total, total_s = now.num_graphs - self._first.num_graphs, now.compile_s - self._first.compile_s
            self._reporters.fact(
                "compilations", f"{formatting.count(total, 'graph')} compiled in {total_s:.1f} s"
            )
        self._check_graphs(phase, shapes, num_graphs, now.compile_s - self._before.compile_s)
        self._check_reads(self._phases[phase], now.num_scalars - self._before.num_scalars)
        self._check_fallbacks(now.fallbacks)
        self._before = now

    def end_loop(self) -> None:
        """Handle the end of a loader."""
        self.end_step()
        for phase in self._phases:
            self._report(phase)

    def _check_graphs(self, phase: str, shapes: str, num_graphs: int, seconds: float) -> None:
        steps = self._phases[phase]
        if steps.num_steps <= WARM_UP_STEPS and len(steps.shapes) == 1:
            steps.num_graphs += num_graphs
            steps.compile_s += seconds
            return
        self._report(phase)
        if num_graphs == 0:
            return
        if steps.shapes[shapes] == 1:
            usual = steps.shapes.most_common(1)[0][0]
            self._note_cause(
                f"{phase} shape",
                f"{phase} step {steps.num_steps} compiled {formatting.count(num_graphs, 'new graph')} in "
                f"{seconds:.1f} s: its batch is {shapes}, but the others are {usual}. Every new shape costs a "
                "compilation, so keep one batch size (even_batches=True, or drop_last=True) and pad sequences to a "
                "few fixed lengths",
            )
        elif steps.shapes[shapes] > WARM_UP_STEPS:
            steps.num_late_steps += 1
            if steps.num_late_steps == _CHANGING_STEPS:
                self._reporters.note(
                    f"{phase}: {_CHANGING_STEPS} steps compiled new graphs although the batch shape did not "
                    f"change (the last took {seconds:.1f} s): something else in the loop changes between steps, for "
                    "example the model, a Python number in a computation, or a branch",
                )

    def _check_reads(self, steps: _Phase, num_scalars: int) -> None:
        steps.num_reading_steps = steps.num_reading_steps + 1 if num_scalars > 0 else 0
        if steps.num_reading_steps == _READING_STEPS:
            self._note_cause(
                "reads",
                "every step reads a value from the device (item(), float(), or `if` on a tensor): each read waits "
                "for the device, and before optimizer.step() it also splits the graph. Read values every few "
                "hundred steps, or after the loop; accelerator.backward reports the loss without a read",
            )

    def _check_fallbacks(self, fallbacks: Mapping[str, int]) -> None:
        for name in sorted(fallbacks):
            if fallbacks[name] > self._before.fallbacks.get(name, 0):
                self._note_cause(
                    name,
                    f"{name} runs on the CPU, because the device does not support it: every call copies its inputs "
                    "and outputs between host and device",
                )

    def _report(self, phase: str) -> None:
        """Report once what was compiled during the first steps of a phase."""
        steps = self._phases[phase]
        if steps.num_graphs and not steps.is_reported:
            steps.is_reported = True
            compiled = f"{formatting.count(steps.num_graphs, 'graph')} compiled in {steps.compile_s:.1f} s"
            self._reporters.note(f"{phase}: {compiled}, for batches of {next(iter(steps.shapes))}")

    def _note_cause(self, cause: str, text: str) -> None:
        if cause not in self._reported:
            self._reported.add(cause)
            self._reporters.note(text)


def describe(batch: Any) -> str:
    """Return the shapes of a batch's tensors, such as ``"32x64, 32"``."""
    return (
        ", ".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors(batch)) or "no tensors"
    )
