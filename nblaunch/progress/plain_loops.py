"""Training loops without nblaunch's Accelerator, in plain PyTorch or in any library.

    for batch in DataLoader(...):     _BaseDataLoaderIter.__next__   reads a batch
        loss.backward()               torch.autograd.backward        marks the loop as an epoch; provides the loss
        optimizer.step()              hook of torch.optim            counts a step; without a loader, an iteration

Hooks on torch see these calls, whichever library makes them. A loop over a loader counts as training if it calls
``backward``, and otherwise as evaluation. Some libraries read ahead, so batches that were read before the first
``backward``, except the last, count as not done.

The loss is the tensor on which ``backward`` was called. It is shown as it was before a ``GradScaler`` scaled it and
before the loop divided it by the number of micro-steps. Calls by nblaunch's Accelerator are ignored, because it makes
its own reports.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from time import monotonic
from types import FrameType
from typing import Any

from nblaunch import context, packages
from nblaunch.events import Note, WorkerState
from nblaunch.progress import batches
from nblaunch.progress.loss_graphs import OwnUpdates, divisor_of
from nblaunch.progress.planned_epochs import Place, iterations_left, places_around
from nblaunch.progress.same_samples import FirstLosses, SameSamples
from nblaunch.progress.sampler_epochs import SamplerEpochs
from nblaunch.user_code import user_frame_behind
from nblaunch.wire.spans import SpanKind, start_of

_PLACE_S = 0.25
"""Seconds between inspections of the user's loops; an inspection costs as much as a small step."""

_LOOK_PAUSE = 20
"""Minimum time until the next inspection, as a multiple of the processor time of the last one."""

_MAX_HELD = 256  # losses of one optimizer step
_BATCHES_PER_SIZE = 8  # measure one batch out of this many
_DATA = SpanKind.DATA  # looking up an enum member is slow
_DATA_HERE = start_of(SpanKind.DATA)  # for a loader without worker processes
_LOSS = "_nblaunch_loss"
_REPORTED = "_is_reported_to_nblaunch"
_HANDS_ON = ("torch", "tqdm", "nblaunch", "contextlib")
"""Packages whose loops over a loader count as loops of the code that calls them."""


def watch() -> None:
    """Set the hooks in this worker, now or when torch is imported."""
    _hooks_of_closures.clear()
    _made.clear()  # the fork has copied the kernel's loops, perhaps in the middle of a failed backward pass
    packages.observe_when_imported("torch.utils.data.dataloader", _watch_loaders)
    packages.observe_when_imported("torch.autograd", _watch_backward)
    packages.observe_when_imported("torch.amp.grad_scaler", _watch_scaler)
    context.current().slot.note_step = _note_step


@packages.defines_replacements
def _watch_loaders(module: Any) -> None:
    iterator = module._BaseDataLoaderIter
    read = iterator.__next__
    spans = context.current().slot.spans

    @packages.replaces(iterator, "__next__")
    def read_and_note(self: Any) -> Any:
        began_s = monotonic()
        try:
            batch = read(self)
        except StopIteration:
            try:
                if not hasattr(self, _REPORTED):
                    plain_loops().end(self)
            except Exception as error:
                give_up(error)
            raise
        ended_s = monotonic()
        try:
            if spans is not None:
                is_measured, num_workers = self._num_yielded % _BATCHES_PER_SIZE == 1, self._num_workers
                start = _DATA_HERE
                if is_measured or num_workers:
                    start = start_of(_DATA, num_workers, batches.num_elements(batch) if is_measured else 0)
                spans.write(start, began_s, ended_s)
            if not hasattr(self, _REPORTED):
                plain_loops().note_batch(self, batch)
        except Exception as error:
            give_up(error)
        return batch


def leave_out(iterator: Any) -> None:
    """Ignore reads from an iterator of torch's loader, because the caller reports them."""
    with suppress(AttributeError):
        setattr(iterator, _REPORTED, True)


@packages.defines_replacements
def _watch_backward(module: Any) -> None:
    compute, slot = module.backward, context.current().slot

    @packages.replacement_of(compute)
    def compute_and_note(
        tensors: Any, grad_tensors: Any = None, retain_graph: Any = None, create_graph: bool = False,
        grad_variables: Any = None, inputs: Any = None,
    ) -> None:  # fmt: skip
        # The parameters are written out, because *args and **kwargs would take longer than all the other lines.
        if slot.record_backward is not None:
            slot.record_backward()
        plain = _made[-1] if _made else plain_loops()
        if plain.reports.busy_time.is_in_backward and not plain._readings:  # an Accelerator reports it
            compute(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
            return
        plain, loss = plain_loops(), None
        try:
            is_noted = plain.begin_backward()
            loss = plain.loss_of(tensors) if is_noted else None
        except Exception as error:
            give_up(error)
            is_noted = False
        try:
            compute(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
        finally:
            if is_noted:
                plain.end_backward()
        if is_noted:
            plain.hold(loss)

    module.backward = compute_and_note
    # In a compiled function, torch.compile would otherwise try to compile the hook, and warn about its calls.
    packages.observe_when_imported(
        "torch._dynamo.eval_frame", lambda dynamo: dynamo.skip_code(compute_and_note.__code__)
    )


def _watch_scaler(module: Any) -> None:
    scale = module.GradScaler.scale

    @packages.replaces(module.GradScaler, "scale")
    def scale_and_note(self: Any, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        if scaled is not outputs and hasattr(scaled, "grad_fn"):
            setattr(scaled, _LOSS, outputs)
        return scaled


def _note_step(frame: FrameType, has_arguments: bool) -> None:
    """Record that an optimizer is beginning a step; called by the hook in ``worker/optimizer_steps.py``."""
    try:
        plain = plain_loops()
        plain.note_step(frame)
        plain.settle()
    except Exception as error:
        give_up(error)
    if has_arguments and not _hooks_of_closures:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        _hooks_of_closures.append(register_optimizer_step_post_hook(_note_end_of_step))


def _note_end_of_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    import torch

    if torch.compiler.is_dynamo_compiling():
        return
    try:
        plain = plain_loops()
        if plain._held:  # the optimizer called a closure, which ran backward
            plain.show_losses()
    except Exception as error:
        give_up(error)


_hooks_of_closures: list[Any] = []


@dataclass(eq=False)
class _Reading:
    """A loop over a loader.

    Args:
        iterator: iterator of the loader.
        length: number of batches; -1 if unknown.
        places: places of the user's loops around it, innermost first; None if unknown.
        num_read: number of batches that were read.
        num_ahead: number of these batches that are not done when the next batch is read.
        num_late: number of these batches that are still to be trained on after the loader has ended; 0 before that.
        num_rows: rows in the batches that were read before the loop was on the board, and are not counted yet.
        read_at: sequence number of its last read among the reads of all loops; 0 once ``backward`` has been called for
            it.
        loop: loop on the board; None until its kind is known.
    """

    iterator: weakref.ref[Any]
    length: int
    places: list[Place] | None
    num_read: int = 0
    num_ahead: int = 0
    num_late: int = 0
    num_rows: int = 0
    read_at: int = 0
    loop: Any = None

    @property
    def trains(self) -> bool:
        return self.loop is not None and self.loop.state is WorkerState.TRAINING


@dataclass
class PlainLoops:
    """The plain loops of this process. Only loops in its main thread are shown.

    Args:
        home: the context of this process, which an inline launch drops at its end.
        reports: reports of this process.
        number: number of the session's command that runs the loops.
        sums_losses: whether the losses of an optimizer step are parts of one loss and are summed; otherwise each is a
            separate loss.
    """

    home: weakref.ref[context.ProcessContext]
    reports: Any
    number: int = 0
    sums_losses: bool = False
    _readings: list[_Reading] = field(default_factory=list)
    _num_epochs: int = 0
    _num_reads: int = 0
    _held: list[Any] = field(default_factory=list)
    _is_in_backward: bool = False
    _began_s: float = 0.0  # when the backward pass began
    _without_loader: Any = None  # the innermost loop, if no loader is read
    _next_look_s: float = 0.0
    _thread: int | None = field(default_factory=lambda: threading.main_thread().ident)

    def __post_init__(self) -> None:
        here: Any = self.home()
        self._first_losses = FirstLosses(here)
        self._own_updates = OwnUpdates(here.slot)
        self._same_samples = SameSamples(here)
        self._sampler_epochs = SamplerEpochs(here)

    @property
    def is_given_up(self) -> bool:
        """Whether an error ended the observation."""
        return self._thread is None

    @property
    def last_iterator(self) -> Any:
        """The iterator of the loader that last returned a batch; None if no loader is being read."""
        reading = max(self._readings, key=attrgetter("read_at"), default=None)
        return reading.iterator() if reading is not None and reading.read_at else None

    # --- batches -----------------------------------------------------------------------------------------------------

    def note_batch(self, iterator: Any, batch: Any) -> None:
        """Count a batch that was read."""
        if not self._is_ours():
            return
        reading = self._reading_of(iterator)
        self._num_reads += 1
        reading.num_read += 1
        reading.read_at = self._num_reads
        if self._same_samples.is_looking:
            self._same_samples.note_batch(iterator, batch)
        rows = batches.num_rows(batch)
        if reading.loop is not None:
            self.reports.loops.advance(reading.loop, rows)
            return
        reading.num_rows += rows
        if reading.num_read > 1 and not self._trains_ahead(reading):
            reading.loop = self.reports.loops.begin(
                reading.length, 0, WorkerState.EVALUATING, reading.num_read, num_epochs=0
            )

    def end(self, iterator: Any) -> None:
        """End the loop over a loader."""
        for reading in self._readings:
            if reading.iterator() is iterator:
                if reading.trains:
                    self._sampler_epochs.end_epoch(iterator)
                reading.num_late = reading.num_ahead if reading.trains else 0
                if not reading.num_late:
                    self._end(reading)
                return

    def _reading_of(self, iterator: Any) -> _Reading:
        """Return the loop over ``iterator``; at the iterator's first batch, begin a new one."""
        for reading in list(self._readings):
            iterated = reading.iterator()
            if iterated is None or (iterated is iterator and iterator._num_yielded <= reading.num_read):
                self._end(reading)  # the user left the loop, or it begins again
            elif iterated is iterator:
                return reading
        for reading in [reading for reading in self._readings if reading.num_read == reading.length]:
            self._end(reading)  # some libraries never request a batch after the last
        try:
            length = len(iterator)
        except Exception:  # TypeError, or whatever a user's sampler raises if its length is unknown
            length = -1
        frame = sys._getframe(3)
        is_users = user_frame_behind(frame, _HANDS_ON) is not None
        reading = _Reading(weakref.ref(iterator), length, places_around(frame) if is_users else None)
        self._readings.append(reading)
        self.reports.loops.unsettle()
        return reading

    def _trains_ahead(self, reading: _Reading) -> bool:
        """Return whether a training framework may be reading batches ahead, before the first ``backward``."""
        import torch

        plan = self.reports.loops.plan
        trains = any(reading.trains for reading in self._readings)
        return plan is not None and torch.is_grad_enabled() and not trains

    def _end(self, reading: _Reading) -> None:
        self._readings.remove(reading)
        loop, loops = reading.loop, self.reports.loops
        if loop is None:
            return
        if reading.num_ahead and reading.num_read == reading.length:
            loops.move_to(loop, reading.length, reading.num_rows)
        if reading.trains:
            self.show_losses()
            self.reports.losses.flush()
            self.reports.busy_time.pause()
        if loops.end(loop) and reading.trains:
            self.reports.report_epoch(loop)

    def _is_ours(self) -> bool:
        """Return whether a batch belongs to a plain loop, not to nblaunch's loader or another thread."""
        running = self.reports.loops.running
        is_plain = running is None or running.is_over_epochs or running is self._without_loader
        if not is_plain and self._readings:
            is_plain = any(reading.loop is running for reading in self._readings)
        return is_plain and threading.get_ident() == self._thread

    def finish(self) -> None:
        """End all loops, because the function has returned."""
        self.show_losses()
        self._same_samples.finish()
        for reading in list(self._readings):
            self._end(reading)
        self._end_loop_without_loader()

    def give_up(self) -> None:
        """Stop showing loops until the next command of a session."""
        self._thread = None
        self._is_in_backward = False
        self._without_loader = None
        self.reports.loops.unsettle()
        self._readings.clear()
        self._held.clear()

    # --- losses ------------------------------------------------------------------------------------------------------

    def begin_backward(self) -> bool:
        """Begin a backward pass; return False if it is part of another one, or if nblaunch's Accelerator started it."""
        busy_time = self.reports.busy_time
        if self._is_in_backward or threading.get_ident() != self._thread:
            return False
        if self._held and self._own_updates.take():
            self.show_losses()
        if self._readings:
            self._begin_training()
        if busy_time.is_in_backward:
            return False
        self._is_in_backward = busy_time.is_in_backward = True
        if self._same_samples.is_looking:
            self._same_samples.before_backward()
        self._began_s = monotonic()
        return True

    def end_backward(self) -> None:
        """End a backward pass."""
        self._is_in_backward = False
        self.reports.busy_time.end_backward(self._began_s)
        if self._same_samples.is_looking:
            self._same_samples.after_backward()

    def loss_of(self, tensors: Any) -> tuple[Any, float] | None:
        """Return the loss on which ``backward`` is called, and its divisor; None if it is not a number."""
        loss = getattr(tensors, _LOSS, tensors)
        if not hasattr(loss, "numel") or loss.numel() != 1 or self.reports.losses.backend.is_lazy:
            return None
        self._first_losses.add(loss.detach())
        self._own_updates.remember(loss)
        return loss.detach().clone(), divisor_of(loss)

    def hold(self, loss: tuple[Any, float] | None) -> None:
        """Keep the loss until the optimizer steps."""
        if loss is not None and len(self._held) < _MAX_HELD:
            self._held.append(loss)
            self.reports.loops.unsettle()

    def show_losses(self) -> None:
        """Show the losses of this optimizer step."""
        if not self._held:
            return
        self._own_updates.take()
        held, self._held = self._held, []
        losses = [loss for loss, _ in held]
        if len(held) > 1 and self.sums_losses:
            losses = [sum(losses[1:], losses[0])]
        elif len(held) > 1:
            losses = [loss * divisor if divisor == len(held) else loss for loss, divisor in held]
        for loss in losses:
            self.reports.losses.note(loss, monotonic())

    def _begin_training(self) -> None:
        """Record that the loop that read the last batch is a training loop. There must be such a loop."""
        reading = max(self._readings, key=attrgetter("read_at"))
        read_at = reading.read_at
        for other in self._readings:
            other.read_at = 0
        if not read_at or reading.trains:
            return
        loops = self.reports.loops
        if reading.loop is not None:
            loops.end(reading.loop)
        reading.num_ahead = max(reading.num_read - 1, 0)
        epoch, num_epochs = self._epoch_of(reading)
        length = reading.length if reading.length >= 0 or loops.plan is None else loops.plan.length
        reading.length = length
        reading.loop = loops.begin(length, epoch, WorkerState.TRAINING, num_epochs=num_epochs)
        # The batches ahead count as steps of their own, although they are read already.
        num_done = reading.num_rows // (reading.num_ahead + 1)
        reading.num_rows -= num_done
        loops.advance(reading.loop, num_done)

    def _epoch_of(self, reading: _Reading) -> tuple[int, int]:
        """Return the number of this epoch, counted from 1, and the total number of epochs (0 if unknown)."""
        self._num_epochs += 1
        plan = self.reports.loops.plan
        if plan is not None:
            return plan.epoch, plan.num_epochs
        if reading.places is None:
            return self._num_epochs, 0
        before = reading.places[0].num_before if len(reading.places) == 1 else 0
        total = 1
        for place in reading.places:
            total *= place.size
        return before + total - iterations_left(reading.places) + 1, before + total

    # --- steps -------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Let the optimizer hook count the next steps, until the loops change or must be inspected.

        A prepared loader reports its own batches. A loop without a loader has one iteration per step.
        """
        loops = self.reports.loops
        running = loops.running
        if running is None or self._readings or self._held:
            return
        if running is not self._without_loader:
            loops.settle(None, math.inf)
        elif loops.shown is running and not 0 <= running.total <= running.step:
            loops.settle(running, self._next_look_s)

    def note_step(self, frame: FrameType | None) -> None:
        """Record that an optimizer is beginning a step.

        If no loader is being read, the step is an iteration of the user's innermost loop.
        """
        loops = self.reports.loops
        running = loops.running
        has_no_loader = not self._readings and (running is None or running is self._without_loader)
        if has_no_loader and threading.get_ident() == self._thread:
            now_s = monotonic()
            if running is not None and now_s < self._next_look_s and not 0 <= running.total <= running.step:
                loops.advance(running)
            else:
                began_s = time.thread_time()
                self._show_iterations(running, places_around(frame, is_inside=True))
                # The more items the user's loops have, the longer an inspection takes.
                self._next_look_s = now_s + max(_PLACE_S, _LOOK_PAUSE * (time.thread_time() - began_s))
        num_trained = len(self._held)
        if num_trained:
            self.show_losses()
        if self._readings:
            for reading in [reading for reading in self._readings if reading.num_late]:
                reading.num_late -= num_trained
                if reading.num_late <= 0:
                    self._end(reading)

    def count_step(self) -> None:
        """Count a step of an optimizer that is not a torch optimizer and has no hooks."""
        self.show_losses()
        self.reports.losses.count_update()

    def _show_iterations(self, loop: Any, places: list[Place] | None) -> None:
        """Show the positions of the user's loops around an optimizer step."""
        loops = self.reports.loops
        if not places:
            if loop is None:
                self._without_loader = loop = loops.begin(-1, 0, WorkerState.TRAINING, num_epochs=0)
            loops.advance(loop)
            return
        innermost, *outer = places
        num_outer = 1
        for place in outer:
            num_outer *= place.size
        epoch = num_outer - iterations_left(outer) + 1 if outer else 0
        total = innermost.num_before + innermost.size
        step = innermost.num_before + innermost.position + 1
        if loop is None or loop.total != total or loop.epoch != epoch:
            if loop is not None:
                loops.move_to(loop, max(loop.total, loop.step))
            self._end_loop_without_loader()
            num_epochs = num_outer if outer else 0
            self._without_loader = loop = loops.begin(
                total, epoch, WorkerState.TRAINING, step - 1, num_epochs=num_epochs
            )
        loops.move_to(loop, max(step, loop.step))

    def _end_loop_without_loader(self) -> None:
        loop, self._without_loader = self._without_loader, None
        if loop is not None:
            self.reports.losses.flush()
            if self.reports.loops.end(loop) and loop.epoch:
                self.reports.report_epoch(loop)


def plain_loops() -> PlainLoops:
    """Return this process's plain loops; each command of a session gets new ones. Called several times per step."""
    if _made:
        last = _made[-1]
        here = last.home()
        if here is not None and here.is_current and last.number == last.reports.loops.num_commands:
            return last
    return _make()


def _make() -> PlainLoops:
    from nblaunch.progress.board_reports import get_reports  # imports torch

    reports = get_reports()
    _made[:] = [PlainLoops(weakref.ref(context.current()), reports, reports.loops.num_commands)]
    reports.at_end[:] = [_made[-1].finish]
    return _made[-1]


_made: list[PlainLoops] = []


def give_up(error: Exception) -> None:
    """Report an error in a hook once, and stop showing plain loops; the error must not end the user's training."""
    if not plain_loops().is_given_up:
        plain_loops().give_up()
        here = context.current()
        *_, place = traceback.extract_tb(error.__traceback__)
        text = (
            f"nblaunch stopped showing the steps of this loop: {type(error).__name__}: {error} "
            f"({os.path.basename(place.filename)}:{place.lineno}). Training is not affected"
        )
        here.emit(Note(here.topology.rank, text=text))


def harmless(note: Callable[..., None]) -> Callable[..., None]:
    """Decorate a hook so that its errors end the display but not the user's training."""

    @functools.wraps(note)
    def note_or_give_up(*args: Any, **kwargs: Any) -> None:
        try:
            note(*args, **kwargs)
        except Exception as error:
            give_up(error)

    return note_or_give_up
