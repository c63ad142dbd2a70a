"""Which step of a loop compiled what on a lazy device.

Such a device compiles a step's graph at its first steps and whenever the graph changes: another input shape, another
branch, a value read in the middle. That takes from seconds to minutes each time and looks like a hang, so it is
reported: once per cause, with the step, the shapes and the time.

A loop may need several graphs by itself: for the steps in the middle of an accumulation window, for steps in which an
optimizer has state, and for the last batch. So a few steps that compile later do not count as a cause; only many do.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nblaunch import formatting
from nblaunch.backends.base import tensors

WARM_UP_STEPS = 2
"""Steps of a shape that compile in any case: values that appear in the first are inputs of the second."""

_READING_STEPS = 3  # in a row: a value that is read now and then is nothing to report
_CHANGING_STEPS = 10  # more than the kinds of steps that a loop has by itself


@dataclass(frozen=True)
class Counters:
    """The compiler's counters at one moment, since the start of the process.

    Args:
        num_graphs: graphs that were compiled.
        compile_s: time that took.
        fallbacks: operation -> how often it ran on the CPU, because the device does not have it.
        num_scalars: tensors of the device that were read as a Python number.
    """

    num_graphs: int = 0
    compile_s: float = 0.0
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    num_scalars: int = 0


@dataclass
class _Phase:
    """Steps that share a name, as "training": how many of each shape there were, and what they compiled."""

    shapes: collections.Counter[str] = field(default_factory=collections.Counter)
    num_steps: int = 0
    num_graphs: int = 0  # of its first steps
    compile_s: float = 0.0
    is_reported: bool = False
    num_reading_steps: int = 0  # in a row
    num_late_steps: int = 0  # that compiled for shapes that were known


class CompileWatch:
    """Watches one process's steps.

    Args:
        read: gives the counters now.
        note: takes a sentence for the user.
        compiling: takes whether the process is, most likely, compiling.
        fact: takes how many graphs were compiled in all, a name and a few words.
    """

    def __init__(
        self,
        read: Callable[[], Counters],
        note: Callable[[str], None],
        compiling: Callable[[bool], None],
        fact: Callable[[str, str], None],
    ) -> None:
        self._read = read
        self._note = note
        self._compiling = compiling
        self._fact = fact
        self._phases: dict[str, _Phase] = {}
        self._before = self._first = read()
        self._open: tuple[str, str] | None = None
        self._reported: set[str] = set()

    def begin_step(self, phase: str, batch: Any) -> None:
        """End the step before and begin one of ``phase`` on ``batch``."""
        self.end_step()
        self._before = self._read()
        shapes = describe(batch)
        known = self._phases.setdefault(phase, _Phase())
        known.num_steps += 1
        known.shapes[shapes] += 1
        self._open = (phase, shapes)
        self._compiling(known.shapes[shapes] <= WARM_UP_STEPS)

    def leave(self) -> None:
        """Forget the current step: its loop was left in the middle."""
        if self._open is not None:
            self._open = None
            self._compiling(False)

    def end_step(self) -> None:
        """Report what the current step has compiled, if there is one."""
        if self._open is None:
            return
        (phase, shapes), self._open = self._open, None
        now = self._read()
        self._compiling(False)
        num_graphs = now.num_graphs - self._before.num_graphs
        if num_graphs:
            total, total_s = now.num_graphs - self._first.num_graphs, now.compile_s - self._first.compile_s
            self._fact("compilations", f"{formatting.count(total, 'graph')} compiled in {total_s:.1f} s")
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
        known = self._phases[phase]
        if known.num_steps <= WARM_UP_STEPS and len(known.shapes) == 1:
            known.num_graphs += num_graphs
            known.compile_s += seconds
            return
        self._report(phase)
        if num_graphs == 0:
            return
        if known.shapes[shapes] == 1:
            usual = known.shapes.most_common(1)[0][0]
            self._note_cause(
                f"{phase} shape",
                f"{phase} step {known.num_steps} compiled {formatting.count(num_graphs, 'new graph')} in "
                f"{seconds:.1f} s: its batch is {shapes}, the others are {usual}. Every new shape is compiled: "
                "keep one batch size (even_batches=True, or drop_last=True) and pad sequences to a few fixed "
                "lengths",
            )
        elif known.shapes[shapes] > WARM_UP_STEPS:
            known.num_late_steps += 1
            if known.num_late_steps == _CHANGING_STEPS:
                self._note(
                    f"{phase}: {_CHANGING_STEPS} steps compiled new graphs although the batch shape did not "
                    f"change, the last one in {seconds:.1f} s: something else in the loop changes between steps: "
                    "another model, a Python number in a computation, or a branch",
                )

    def _check_reads(self, known: _Phase, num_scalars: int) -> None:
        known.num_reading_steps = known.num_reading_steps + 1 if num_scalars > 0 else 0
        if known.num_reading_steps == _READING_STEPS:
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
        """Report what the first steps of a phase compiled, once."""
        known = self._phases[phase]
        if known.num_graphs and not known.is_reported:
            known.is_reported = True
            compiled = f"{formatting.count(known.num_graphs, 'graph')} compiled in {known.compile_s:.1f} s"
            self._note(f"{phase}: {compiled}, for batches of {next(iter(known.shapes))}")

    def _note_cause(self, cause: str, text: str) -> None:
        if cause not in self._reported:
            self._reported.add(cause)
            self._note(text)


def describe(batch: Any) -> str:
    """Return the shapes of a batch's tensors, as ``"32x64, 32"``."""
    return (
        ", ".join("x".join(map(str, tensor.shape)) or "scalar" for tensor in tensors(batch)) or "no tensors"
    )
