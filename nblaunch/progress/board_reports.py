"""A rank's reports on the progress board: loops over data, loss, device memory, busy time.

All libraries in a process share its :class:`Reports`.

Busy time is the time that a rank spends on a step, excluding waits for other ranks. It reveals a straggler among ranks
that run in lockstep:

    batch ──> forward ──> backward (ranks wait for each other) ──> optimizer ──> next batch ──> forward ──> backward
                                                              └────────── busy time ──────────┘

If gradients are averaged, all ranks are as slow as the slowest rank, which has the longest busy time. On devices that
compute asynchronously, busy time covers only Python's work. It then reveals slow loading and slow hosts, but not slow
devices.
"""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import torch

from nblaunch import context
from nblaunch.backends.base import Backend
from nblaunch.errors import user_frame
from nblaunch.events import EpochEnded, WorkerState
from nblaunch.progress.planned_epochs import EpochPlan, iterations_left, places_around
from nblaunch.user_code import is_user_file
from nblaunch.weights import is_sharded
from nblaunch.wire.board import MAX_BINS, LossCurve, Slot
from nblaunch.wire.spans import SpanKind, start_of


@dataclass(slots=True, eq=False)
class Loop:
    """One loop over a loader or another iterable, from first to last batch. A training loop counts as an epoch.

    Args:
        total: number of batches; -1 if unknown.
        epoch: number of the epoch, counted from 1; 0 if the loop does not train.
        state: activity of the process in the loop.
        step: number of completed batches.
        number: number of the loop in this process, counted from 1.
        is_over_epochs: whether the items of the loop are epochs.
        num_epochs: how many epochs there will be in total; 0 if unknown.
        before: what the board showed before the loop, if the loop trains.
        began_s: start of the loop.
    """

    total: int
    epoch: int
    state: WorkerState
    step: int
    number: int
    is_over_epochs: bool
    num_epochs: int = 0
    before: Any = None
    began_s: float = field(default_factory=monotonic)


def length_of(iterable: Any) -> int:
    """Return the number of items; -1 if unknown."""
    try:
        return len(iterable)
    except Exception:  # TypeError, or any error that a user's sampler raises if it has no length
        return -1


class LoopStack:
    """The loops that are running in this process, outermost first; the last one writes to the slot.

    ``epoch`` is the number of the current or last epoch, counted from 1. It is shown even during loops that do not
    train. ``last_training`` is the number of the training loop that began last. ``plan`` is the plan of the framework
    that is training, or None. ``running`` is the innermost running loop, or None. ``shown`` is the loop on the board,
    or None after its end.
    """

    def __init__(self, slot: Slot) -> None:
        self.epoch = 0
        self.last_training = 0
        self.num_commands = 0  # completed commands of a session
        self.plan: EpochPlan | None = None
        self._num_epochs = 0
        self._num_loops = 0
        self._slot = slot
        self._stack: list[Loop] = []
        self.running: Loop | None = None
        self.shown: Loop | None = None
        self._outside = WorkerState.RUNNING

    def begin(
        self,
        total: int,
        epoch: int,
        state: WorkerState,
        step: int = 0,
        *,
        is_over_epochs: bool = False,
        num_epochs: int | None = None,
    ) -> Loop:
        """Begin a loop inside the running loops, with the arguments of :class:`Loop`.

        If ``num_epochs`` is None, the number is read from the user's code.
        """
        self._num_loops += 1
        begun = Loop(total, epoch, state, step, self._num_loops, is_over_epochs)
        if not self._stack:
            self._outside = self._slot.state
        if state is WorkerState.TRAINING:
            begun.before = self._slot.loop, self.last_training, self.epoch, self._num_epochs
            self.last_training = begun.number
            planned = self._planned_epochs(epoch) if num_epochs is None else (epoch, num_epochs)
            self.epoch, self._num_epochs = begun.epoch, begun.num_epochs = planned
        self._stack.append(begun)
        self.running = begun
        self._show(begun)
        return begun

    def advance(self, loop: Loop, samples: int = 0) -> None:
        """Count the next batch of ``loop``. Called in every step."""
        loop.step += 1
        if self.shown is loop:
            self._slot.advance(samples)
        elif self.running is loop:
            self._show(loop)
            self._slot.count_samples(samples)
            if not loop.is_over_epochs:
                self._slot.count_step()
        elif loop not in self._stack:  # a later command continues the loop
            if not self._stack:
                self._outside = self._slot.state
            self._stack.append(loop)
            self.running = loop
            self._show(loop)
            self._slot.count_samples(samples)

    def begin_anew(self) -> None:
        """Forget all loops from an earlier command, because tracebacks or variables may keep unfinished loops alive."""
        self._stack, self.running, self.shown, self.plan = [], None, None, None
        self.unsettle()
        self.num_commands += 1

    def settle(self, counted: Loop | None, until_s: float) -> None:
        """Count each optimizer step as an iteration of ``counted``, if it is not None, without inspecting the loops.

        The counting ends at ``until_s`` (monotonic clock), or earlier if the loops change.
        """
        self._slot.counted, self._slot.settled_until_s = counted, until_s

    def unsettle(self) -> None:
        """Inspect the loops at the next step."""
        self._slot.settled_until_s = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether no loop is running."""
        return not self._stack

    def move_to(self, loop: Loop, step: int, samples: int = 0) -> None:
        """Set the number of completed steps of ``loop``, and count samples of the steps in between."""
        if samples:
            self._slot.count_samples(samples)
        if self.shown is loop:
            loop.step = step
            self._slot.advance_to(step)

    def set_plan(self, plan: EpochPlan | None, job_steps: tuple[int, int]) -> None:
        """Store a framework's plan for its training, or None once training has ended.

        Args:
            plan: plan of the epoch that is beginning or running.
            job_steps: numbers of completed and of all optimizer steps; zeros if the framework does not count them.
        """
        self.plan = plan
        self._slot.set_job_steps(*job_steps)

    def end(self, loop: Loop, is_epoch: bool = True) -> bool:
        """Remove ``loop``, which has ended or was abandoned; return whether it belongs to this command.

        Args:
            is_epoch: False if the user only looked at a batch of a training loader; the board then shows the previous
                loop again.
        """
        if loop not in self._stack:
            return False
        self._stack.remove(loop)
        self.running = self._stack[-1] if self._stack else None
        self.unsettle()
        if loop.state is WorkerState.EVALUATING and self._slot.spans is not None:
            self._slot.spans.put(SpanKind.EVALUATION, loop.began_s, monotonic(), value=loop.step)
        is_shown = self.shown is loop
        if loop.state is WorkerState.TRAINING and is_epoch:
            self._slot.end_training(loop.step, loop.total, loop.epoch)
        elif loop.state is WorkerState.TRAINING and is_shown:
            shown, self.last_training, self.epoch, self._num_epochs = loop.before
            self._slot.start_loop(*shown)
        if is_shown:
            self.shown = None
            # The finished loop stays on the board until another one advances; only the activity of the worker changes.
            self._slot.set_state(self._outside if self.running is None else self.running.state)
        return True

    def _show(self, loop: Loop) -> None:
        self.shown = loop
        self.unsettle()
        is_training = loop.state is WorkerState.TRAINING
        epoch, num_epochs = (loop.epoch, loop.num_epochs) if is_training else (self.epoch, self._num_epochs)
        self._slot.start_loop(loop.total, epoch, loop.state, loop.step, loop.number, num_epochs)

    def _planned_epochs(self, epoch: int) -> tuple[int, int]:
        """Return the number of this epoch, counted from 1, and the total number of epochs (0 if unknown).

        The source is the training framework; without one, a loop over ``accelerator.progress``; without either, the
        ``for`` loops in the user's code.
        """
        if self.plan is not None:
            return self.plan.epoch, self.plan.num_epochs
        outer = next((loop for loop in reversed(self._stack) if loop.is_over_epochs), None)
        if outer is not None:
            return epoch, epoch - 1 + outer.total - outer.step if outer.total > 0 else 0
        places = places_around(sys._getframe(2))
        if places is not None and len(places) == 1 and places[0].num_before:
            # The loop covers the remaining epochs of a resumed training run; its loader may not know that.
            place = places[0]
            return place.num_before + place.position + 1, place.num_before + place.size
        left = iterations_left(places)
        return epoch, epoch - 1 + left if left else 0


_BUSY_INTERVAL_S = 0.005
_BACKWARD = start_of(SpanKind.BACKWARD)


class BusyTime:
    """Measures busy time and adds it to the sum on the board, at most 200 times a second.

    The caller sets ``is_in_backward`` when a backward pass begins, because the rank may wait for others during it.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot = slot
        self._spans = slot.spans
        self._since = 0.0
        self._sum_s, self._num_steps = 0.0, 0  # not yet on the board
        self._next_s = 0.0  # time of the next write
        self.is_in_backward = False

    def end_backward(self, began_s: float) -> float:
        """Add the busy time before a backward pass that has just ended; start a new measurement, and return its start.

        Args:
            began_s: ``monotonic()`` when the pass began.
        """
        self.is_in_backward = False
        since_s = self._since
        self._since = now_s = monotonic()
        if self._spans is not None:
            self._spans.write(_BACKWARD, began_s, now_s)
        if since_s:
            self._sum_s += began_s - since_s
            self._num_steps += 1
            if now_s >= self._next_s:
                self._next_s = now_s + _BUSY_INTERVAL_S
                self._show()
        return now_s

    def pause(self) -> None:
        """Stop measuring, because a loop has ended and the time that follows is not part of a step."""
        self._since = 0.0
        self._show()

    def _show(self) -> None:
        if self._num_steps:
            self._slot.add_busy_time(self._sum_s, self._num_steps)
            self._sum_s, self._num_steps = 0.0, 0


_MAX_RECENT = 4096
"""Number of losses that can accumulate between two updates of the board: enough for 8,000 steps per second."""

_NUM_NAN = 3
"""Number of consecutive steps with a NaN loss after which the weights must also be NaN."""

_LOSS_INTERVAL_S = 0.5
_MEMORY_INTERVAL_S = 1.0


@dataclass(slots=True, eq=False)
class _Bin:
    """The losses of a fixed number of optimizer steps.

    Args:
        sum: sum of the losses; a tensor on the device if the losses are there.
        count: number of losses.
        total: sum of the losses that were read.
        num_read: number of losses that were read.
    """

    sum: torch.Tensor | float = 0.0
    count: int = 0
    total: float = 0.0
    num_read: int = 0

    def add_on_device(self, loss: torch.Tensor) -> torch.Tensor:
        """Add a loss on a device with a single operation; return it without its graph."""
        value = loss.data  # ``detach`` would be a second operation
        if not isinstance(self.sum, torch.Tensor):
            self.sum = torch.tensor(self.sum, dtype=torch.float32).to(loss.device)
        is_addable = loss.dim() == 0 and loss.device == self.sum.device  # losses may be on several devices
        self.sum += value if is_addable else value.reshape(()).to(self.sum.device)
        return value

    def absorb(self, other: _Bin) -> _Bin:
        """Merge another bin into this one once both have been read; skip a non-finite bin, whose value would spread."""
        if not math.isfinite(self.total):
            return other
        if math.isfinite(other.total):
            self.total += other.total
            self.count = self.num_read = self.num_read + other.num_read
        return self


def _ignore(step: int) -> None:
    """Ignore NaN."""


class LossReport:
    """Shows this rank's losses on the board, at most twice a second: the last loss, and a curve of means.

    Reading a value from a device makes the process wait, so losses are summed on the device, in bins that end at fixed
    optimizer steps (``wire/board.py``). They are read from time to time, and at the end of a loop. A step ends when any
    optimizer has stepped since the last loss, so several losses or several optimizers can belong to one step.

    It also shows the memory of the rank's device, at most once a second and at the end. ``num_noted`` counts all
    losses; without a launcher, only this number is kept.

    Args:
        slot: slot of this rank.
        backend: device family of this rank.
        report_nan: called once, with the first optimizer step after which all losses are NaN.
    """

    def __init__(self, slot: Slot, backend: Backend, report_nan: Callable[[int], None] = _ignore) -> None:
        self._slot = slot
        self.backend = backend
        self._report_nan = report_nan
        self._next_s = self._next_memory_s = 0.0
        self.num_noted = 0
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all losses, because later losses belong to another command of a session."""
        self._latest: torch.Tensor | float | None = None
        # The last losses that are NaN, or that are on a device and have not been read yet.
        self._recent: deque[tuple[int, torch.Tensor | float]] = deque(maxlen=_MAX_RECENT)
        self._bins: list[_Bin] = []  # the last bin may be incomplete
        self._steps_per_bin = 1
        self._num_steps = self._num_binned = 0  # steps that have begun; steps that have a bin
        self._num_updates = -1  # at the beginning of the last step
        self._epoch_total, self._epoch_count = 0.0, 0  # losses that were read since the last epoch
        self._is_epoch_known = True

    def note(self, loss: torch.Tensor, now_s: float | None) -> None:
        """Add ``loss``. Called in every micro-step; ignores anything but a single real number.

        Args:
            loss: loss of this rank.
            now_s: the time; None if the loss has no value before the step ends, in which case :meth:`show_due` shows
                it.
        """
        self.num_noted += 1
        latest: Any = None
        if type(loss) is torch.Tensor and loss.is_cpu:  # true in most jobs; each call to torch takes time
            try:
                latest = loss.item()  # immediately, as the caller may change it
            except RuntimeError:  # it has several numbers
                return
            if type(latest) is not float:
                return
        elif loss.numel() != 1 or not loss.is_floating_point():
            return
        else:
            if is_sharded(loss):
                loss = loss.to_local()  # type: ignore[attr-defined]
            latest = loss.item() if loss.is_cpu else None
        num_updates = self._slot.updates
        if num_updates != self._num_updates:
            self._num_updates = num_updates
            if self._num_steps == self._num_binned:
                self._begin_bin()
            self._num_steps += 1
        losses = self._bins[-1]
        if latest is None:
            latest, is_number = losses.add_on_device(loss), False
        else:
            losses.sum += latest
            is_number = latest == latest  # false for NaN; a call to ``isnan`` would cost more
        losses.count += 1
        self._latest = latest
        if not is_number:
            self._recent.append((num_updates, latest))
        elif self._recent:
            self._recent.clear()
        if now_s is not None and now_s >= self._next_s:
            self.show_due()

    def count_update(self) -> None:
        """Count a step of an optimizer that torch's hooks do not count."""
        self._slot.num_updates += 1

    @property
    def num_trained(self) -> int:
        """Number of losses and optimizer steps; an increase means that training took place."""
        return self.num_noted + self._slot.num_updates

    def show_due(self) -> None:
        """Show the losses unless they were shown a moment ago."""
        now_s = monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + _LOSS_INTERVAL_S
            self.flush()

    def flush(self) -> None:
        """Show the losses now, and the device's memory if its next update is due."""
        self._show_memory()
        latest, self._latest = self._latest, None
        if latest is None:
            return
        # If the device has failed, the user must see the error from their own call.
        with suppress(RuntimeError):
            self._read()
            means = (losses.total / losses.num_read if losses.num_read else math.nan for losses in self._bins)
            self._slot.set_losses(LossCurve(self._num_steps, self._steps_per_bin, tuple(means)))
            number = _number(latest)
            self._slot.set_loss(number)
            self._look_for_nan(number)

    def _look_for_nan(self, latest: float) -> None:
        """Report NaN if all recent losses are NaN; forget the losses that were shown."""
        recent = self._recent
        if not math.isnan(latest):
            recent.clear()
            return
        run: list[tuple[int, torch.Tensor | float]] = []
        for num_updates, loss in reversed(recent):
            if not math.isnan(_number(loss)):
                break
            run.append((num_updates, math.nan))
        is_begin_known = len(run) < _MAX_RECENT
        recent.clear()
        recent.extend(reversed(run))
        if is_begin_known and len({num_updates for num_updates, _ in run}) >= _NUM_NAN:
            self._report_nan(run[-1][0] + 1)
            self._report_nan = _ignore

    def show_last(self) -> None:
        """Show the final losses and device memory at the end of the function."""
        self._next_memory_s = 0.0
        self.flush()

    def _show_memory(self) -> None:
        now_s = monotonic()
        if now_s < self._next_memory_s:
            return
        self._next_memory_s = now_s + _MEMORY_INTERVAL_S
        memory = self.backend.device_memory()
        if memory is not None:
            self._slot.set_device_memory(*memory)

    def take_mean(self) -> float | None:
        """Return the mean of the losses between the last call and the last :meth:`flush`; None if it is unknown."""
        total, count, is_known = self._epoch_total, self._epoch_count, self._is_epoch_known
        self._epoch_total, self._epoch_count = 0.0, 0
        # The last bin may continue in the next epoch. The sum of that epoch's losses is then the amount by which the
        # bin's sum grows, so the bin's sum must be finite.
        self._is_epoch_known = not self._bins or math.isfinite(self._bins[-1].total)
        return total / count if count and is_known else None

    def _begin_bin(self) -> None:
        """Begin a new bin, because the last one is complete."""
        if len(self._bins) == MAX_BINS:
            self._merge()
        self._bins.append(_Bin())
        self._num_binned = len(self._bins) * self._steps_per_bin

    def _merge(self) -> None:
        """Merge the bins in pairs."""
        with suppress(RuntimeError):  # as in flush
            self._read()
        pairs = zip(self._bins[::2], self._bins[1::2], strict=True)
        self._bins = [first.absorb(second) for first, second in pairs]
        self._steps_per_bin *= 2

    def _read(self) -> None:
        """Read the losses that were summed since the last call."""
        for losses in self._bins:
            if losses.count > losses.num_read:
                total = _number(losses.sum)
                self._epoch_total += total - losses.total
                self._epoch_count += losses.count - losses.num_read
                losses.total, losses.num_read = total, losses.count


def _number(value: torch.Tensor | float) -> float:
    # On a lazy device, another graph would be compiled if a number were read without a copy to the CPU.
    return float(value.cpu() if isinstance(value, torch.Tensor) else value)


# --- the reports of this process --------------------------------------------------------------------------------------

NAN_CHECK = "nan_on_one_rank"
"""Name of the loss check in ``NBLAUNCH_CHECKS``."""


@dataclass(frozen=True)
class Reports:
    """The reports that this process writes to its slot of the board.

    Args:
        loops: the running loops over loaders and iterables.
        losses: the losses, and the memory of the device.
        busy_time: the time per step spent without waiting for other ranks.
        at_begin: called when another command of a session begins.
        at_end: called when the function has returned, before the last losses are shown.
    """

    loops: LoopStack
    losses: LossReport
    busy_time: BusyTime
    at_begin: list[Callable[[], None]] = field(default_factory=list)
    at_end: list[Callable[[], None]] = field(default_factory=list)

    def report_epoch(self, loop: Loop) -> None:
        """Report the end of a loop over a training loader, after its losses have been flushed."""
        here = context.current()
        duration_s = monotonic() - loop.began_s
        mean = self.losses.take_mean()
        here.emit(EpochEnded(here.topology.rank, epoch=loop.epoch, loss=mean, duration_s=duration_s))

    def begin_anew(self) -> None:
        """Forget what an earlier command of a session has shown."""
        self.losses.begin_anew()
        self.loops.begin_anew()
        for begin in self.at_begin:
            begin()

    def finish(self) -> None:
        """Show the final losses and device memory at the end of the function."""
        for finish in self.at_end:
            finish()
        self.busy_time.pause()
        self.losses.show_last()


def get_reports() -> Reports:
    """Return the reports of this process; the first call creates them."""
    here = context.current()
    if here.reports is None:
        losses = LossReport(here.slot, here.backend, _report_nan)
        here.reports = Reports(LoopStack(here.slot), losses, BusyTime(here.slot))
        here.flush_losses, here.forget_losses = here.reports.finish, here.reports.begin_anew
    reports: Reports = here.reports
    return reports


def _report_nan(step: int) -> None:
    """Send the first step after which all losses of this rank are NaN; the launcher compares the ranks' steps."""
    frame = user_frame()
    context.current().observe(
        NAN_CHECK,
        f"losses have been NaN since step {step} on one rank, and since the next step on all others",
        "Check the samples that this rank has read for this step: their gradients made all weights NaN",
        frame if is_user_file(frame.f_code.co_filename) else None,
        step=step,
        value=step,
        judged_by="first",
    )
