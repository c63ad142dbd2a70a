"""Which step of a loop compiled what on a lazy device, and why.

Such a device compiles a step's graph at its first step and whenever the graph changes: another input shape, another
branch, a value read in the middle. That takes from seconds to minutes each time and looks like a hang, so it is
reported: once per cause, with the step, the shapes and the time.

What a loop needs by itself is no cause. Steps of one phase may be of several kinds: those in the middle of an
accumulation window, those in which an optimizer steps, those that another loop interrupts, the one whose results are
cut to the real rows. Each kind has a graph of its own, compiled at its first steps; :meth:`CompileWatch.mark` says of
which kind a step is. What is read or compiled between two loops is no step's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nblaunch import formatting
from nblaunch.backends.base import shapes_in_words, tensors

WARM_UP_STEPS = 2
"""Steps of a kind that compile in any case: values that appear in the first are inputs of the second."""

COLLECTIVE = "collective"
"""Mark of a step in which nblaunch itself reads values from the device, to send them to other ranks."""

_TRAINING = "training"
_READING_STEPS = 3  # in a row: a value that is read now and then is nothing to report


class OptimizerStep(NamedTuple):
    """Mark of a step in which an optimizer steps.

    Args:
        identity: differs between optimizers.
        num_parameters: that it has.
        num_states: parameters that it has state for, before it steps.
    """

    identity: int
    num_parameters: int
    num_states: int


@dataclass(frozen=True)
class Counters:
    """The compiler's counters at one moment, since the start of the process.

    Args:
        num_graphs: graphs that were compiled.
        compile_s: time that took.
        fallbacks: operation -> how often it ran on the CPU, because the device does not have it.
        num_reads: tensors that were brought from the device.
        num_scalars: those of them that were read as a Python number.
    """

    num_graphs: int = 0
    compile_s: float = 0.0
    fallbacks: Mapping[str, int] = field(default_factory=dict)
    num_reads: int = 0
    num_scalars: int = 0


_Kind = tuple[str, frozenset[Hashable]]


@dataclass
class _Phase:
    """Steps that share a name, as "training": how many of each shape and kind there were, and what they compiled."""

    shapes: dict[str, int] = field(default_factory=dict)
    kinds: dict[_Kind, int] = field(default_factory=dict)
    reads: dict[_Kind, int] = field(default_factory=dict)
    optimizers: set[OptimizerStep] = field(default_factory=set)
    num_steps: int = 0
    num_reading_steps: int = 0
    num_late_reads: int = 0
    num_graphs: int = 0
    compile_s: float = 0.0
    is_reported: bool = False

    def has_new_optimizer_state(self, marks: frozenset[Hashable]) -> bool:
        """Return whether an optimizer steps as none has before, though one has stepped with all its state."""
        new = {mark for mark in marks if isinstance(mark, OptimizerStep)} - self.optimizers
        return bool(new) and any(known.num_states for known in self.optimizers)


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
        self._marks: set[Hashable] = set()
        self._cut: Counters | None = None
        self._reported: set[str] = set()

    def begin_step(self, phase: str, batch: Any) -> None:
        """End the step before and begin one of ``phase`` on ``batch``."""
        self.end_step()
        self._before = self._read()
        self._marks.clear()
        self._cut = None
        shapes = describe(batch)
        known = self._phases.setdefault(phase, _Phase())
        known.num_steps += 1
        known.shapes[shapes] = known.shapes.get(shapes, 0) + 1
        self._open = (phase, shapes)
        self._compiling(known.shapes[shapes] <= WARM_UP_STEPS)

    def mark(self, kind: Hashable) -> None:
        """Mark the current step, if there is one: steps with other marks are of another kind."""
        self._marks.add(kind)

    def cut(self) -> None:
        """Handle the end of the step's program: what is computed and read after it is one of its own."""
        self._cut = self._read()

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
        now, known = self._read(), self._phases[phase]
        marks = frozenset(self._marks)
        kind = (shapes, marks)
        known.kinds[kind] = known.kinds.get(kind, 0) + 1
        self._compiling(False)
        num_graphs = now.num_graphs - self._before.num_graphs
        if num_graphs:
            total, total_s = now.num_graphs - self._first.num_graphs, now.compile_s - self._first.compile_s
            self._fact("compilations", f"{formatting.count(total, 'graph')} compiled in {total_s:.1f} s")
        num_reads = now.num_reads - self._before.num_reads
        has_read = num_reads > known.reads.get(kind, 0)
        if has_read and self._cut is not None and self._cut.num_graphs == self._before.num_graphs:
            known.num_late_reads += bool(num_graphs)
            has_read = False
            if known.num_late_reads <= WARM_UP_STEPS:
                num_graphs = 0  # as recommended: a value that is read at times has a program of its own
        self._check_graphs(phase, kind, num_graphs, now.compile_s - self._before.compile_s, has_read)
        known.reads[kind] = num_reads
        known.optimizers |= {mark for mark in marks if isinstance(mark, OptimizerStep)}
        num_scalars = now.num_scalars - self._before.num_scalars
        self._check_reads(known, num_scalars if COLLECTIVE in marks else num_reads)
        self._check_fallbacks(now.fallbacks)
        self._before = now

    def end_loop(self) -> None:
        """Handle the end of a loader."""
        self.end_step()
        for phase in self._phases:
            self._report(phase)

    def _check_graphs(self, phase: str, kind: _Kind, num_graphs: int, seconds: float, has_read: bool) -> None:
        known, (shapes, marks) = self._phases[phase], kind
        has_new_state = known.has_new_optimizer_state(marks)
        is_warm_up = known.kinds[kind] <= WARM_UP_STEPS
        if is_warm_up and len(known.shapes) == 1 and not has_new_state and not known.is_reported:
            known.num_graphs += num_graphs
            known.compile_s += seconds
            return
        self._report(phase)
        if num_graphs == 0:
            return
        graphs = "a new graph" if num_graphs == 1 else f"{num_graphs} new graphs"
        step = f"{phase} step {known.num_steps} compiled {graphs} in {seconds:.1f} s"
        if known.shapes[shapes] == 1 and len(known.shapes) > 1:
            self._note_cause(
                f"{phase} shape",
                f"{step}: its batch is {shapes}, the others are {_usual(known.shapes)}. Every shape is compiled once: "
                "keep one batch size (even_batches=True, or drop_last=True) and pad sequences to a few fixed lengths",
            )
        elif has_new_state:
            self._note_cause(
                f"{phase} optimizer",
                f"{step}: an optimizer is new, or has parameters or state that it did not have before, which are new "
                "inputs of the graph. Build optimizers once, before the loop, with all parameters that will be trained",
            )
        elif not is_warm_up and has_read:
            self._note_cause(
                f"{phase} read",
                f"{step}: a value is read from the device in it (item(), float(), print, or `if` on a tensor), which "
                "the steps before did not do; a read cuts the graph in two. Read after optimizer.step(), or after the "
                "loop",
            )
        elif not is_warm_up and known.shapes[shapes] > WARM_UP_STEPS:
            self._note_cause(
                f"{phase} graph",
                f"{step} although its batch is {shapes} as before: something else in the loop changes from step to "
                "step, as another model, a Python number that enters a computation, or a branch",
            )

    def _check_reads(self, known: _Phase, num_reads: int) -> None:
        known.num_reading_steps = known.num_reading_steps + 1 if num_reads > 0 else 0
        if known.num_reading_steps == _READING_STEPS:
            self._note_cause(
                "reads",
                "a value is read from the device in every step (item(), float(), print, or `if` on a tensor): each "
                "read waits for the device, and before optimizer.step() it also cuts the graph in two. Read every few "
                "hundred steps, or after the loop; accelerator.backward shows the loss by itself",
            )

    def _check_fallbacks(self, fallbacks: Mapping[str, int]) -> None:
        for name in sorted(fallbacks):
            if fallbacks[name] > self._before.fallbacks.get(name, 0):
                self._note_cause(
                    name,
                    f"{name} runs on the CPU, because the device does not have it: its inputs and outputs travel "
                    "between host and device at every call",
                )

    def _report(self, phase: str) -> None:
        """Report what the first steps of a phase compiled, once."""
        known = self._phases[phase]
        if known.is_reported or not known.num_graphs:
            return
        known.is_reported = True
        compiled = f"{formatting.count(known.num_graphs, 'graph')} compiled in {known.compile_s:.1f} s"
        shapes, others = next(iter(known.shapes)), self._phases.get(_TRAINING, _Phase()).shapes
        if phase == _TRAINING or not others or _first(shapes) in map(_first, others):
            self._note(f"{phase}: {compiled}, for batches of {shapes}")
            return
        self._note(
            f"{phase}: {compiled}, for batches of {shapes}, which differ from {_TRAINING}'s {_usual(others)}. Use the "
            "same batch size in both: what they have in common is compiled once then"
        )

    def _note_cause(self, cause: str, text: str) -> None:
        if cause not in self._reported:
            self._reported.add(cause)
            self._note(text)


def _usual(shapes: Mapping[str, int]) -> str:
    """Return the shapes of most steps."""
    return max(shapes, key=lambda one: shapes[one])


def _first(shapes: str) -> str:
    """Return the shape of a batch's first tensor, which an evaluation without targets has too."""
    return shapes.partition(",")[0]


def describe(batch: Any) -> str:
    """Return the shapes of a batch's tensors, as ``"32x64, 32"``."""
    return shapes_in_words(tensor.shape for tensor in tensors(batch)) or "no tensors"
