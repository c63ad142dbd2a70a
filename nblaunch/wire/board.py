"""The board: one slot of shared memory per rank, where workers write their progress and the launcher reads it.

    worker 0 ──writes──> slot 0 ┐
    worker 1 ──writes──> slot 1 ├── one anonymous memory file ──sampled 10 times a second──> launcher
    worker N ──writes──> slot N ┘

After the slots, the same file holds the last collectives of each rank (``collective_calls.py``) and its recorded time
spans (``spans.py``).

Each field has a single writer (the worker or, for some fields, the launcher) and is one aligned 8-byte word. Therefore,
no locks are needed: a reading may combine fields from two consecutive steps, but each number in it is intact. The loss
curve spans many words, so it has a version number that is odd while the worker is writing the curve. Writing a step
takes well under a microsecond and needs no system call.

A :class:`LossCurve` holds a rank's losses over the whole job, as at most :data:`MAX_BINS` means:

    steps 1 2 3 4 5 6 7 8 | 9 ...            a bin first holds the mean loss of 1 optimizer step; when all are full,
    bins  ─┬─ ─┬─ ─┬─ ─┬─                    neighbours are merged, and each holds the mean of 2 steps, then 4, 8 ...

Bins end at fixed steps, no matter when the launcher reads them, so two runs with equal losses have equal curves.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from types import FrameType
from typing import Any

from nblaunch.events import WorkerState
from nblaunch.host import descriptors
from nblaunch.wire import spans
from nblaunch.wire.collective_calls import REGION_BYTES, CallReader
from nblaunch.wire.spans import SpanReader, SpanWriter

MAX_BINS = 64
"""Maximum number of complete bins; an incomplete one may follow."""


LARGEST_DRAWN = 1e300
"""Curves omit larger values, as well as infinity and nan, because sums of them could be infinite."""


@dataclass(frozen=True)
class LossCurve:
    """Means of the losses in bins with the same number of optimizer steps.

    Args:
        num_steps: number of optimizer steps so far, where the last bin ends.
        steps_per_bin: steps in every bin but the last, which may have fewer.
        means: one mean per bin; may be infinite or nan.
    """

    num_steps: int = 0
    steps_per_bin: int = 1
    means: tuple[float, ...] = ()

    def points(self) -> tuple[tuple[float, float], ...]:
        """Return ``(last step, mean)`` of every bin whose mean can be drawn."""
        return tuple(
            (float(min((index + 1) * self.steps_per_bin, self.num_steps)), mean)
            for index, mean in enumerate(self.means)
            if abs(mean) < LARGEST_DRAWN
        )


NO_LOSSES = LossCurve()

_FIRST_MEAN = 40
_WORDS = _FIRST_MEAN + MAX_BINS
_SLOT_BYTES = 8 * _WORDS

# Words of a slot; those without an underscore are used at every step, through ``Slot.words``.
# Integers unless marked; a double is stored in the same 8 bytes through another view.
_STATE, _LOSS, _TOTAL, _EPOCH, _BUSY_TIME, _INTERRUPTS, _BUILT_BYTES, _HAS_LOSS = range(8)  # two doubles
_CHECKS, _STOP_REPLY, _STOP_PROPOSAL, _STOP_DECISION = range(8, 12)  # see wire/stop_agreement.py
_DEVICE_BYTES, _DEVICE_PEAK_BYTES, _DEVICE_LIMIT_BYTES = range(12, 15)
_STEP_TIME, _STEP, _STEPS_DONE, _SAMPLES = range(15, 19)  # a double and three integers
_BUSY_STEPS, UPDATES, _PROGRESS_SIGNS = 19, 20, 21
_CURVE_VERSION, _CURVE_STEPS, _CURVE_STEPS_PER_BIN, _CURVE_LENGTH = range(22, 26)
_NUM_EPOCHS, _LOOP, _TRAINED_STEP, _TRAINED_TOTAL, _TRAINED_EPOCH = range(26, 31)
_KEEPS_WEIGHTS = 31
BOUNDARY_CHECKS, _BOUNDARY_REPLY, BOUNDARY_PROPOSAL, _BOUNDARY_DECISION = range(32, 36)
_JOB_STEPS, _JOB_TOTAL = 36, 37
_HANDING_OVER = 38

PROGRESS = 8 * _STEP_TIME
"""Offset in bytes at which :attr:`Slot.pack` writes."""
_PROGRESS = struct.Struct("@d3q")  # native, so that each number is written as a whole

# Number of attempts to read a curve that changes during the read; a rank that dies while writing leaves the curve's
# version odd forever.
_MAX_READS = 5


@dataclass(frozen=True)
class SlotReading:
    """The contents of one slot at the time of reading.

    Args:
        rank: rank of the slot.
        state: the state that the worker itself has reported.
        step: batches taken from prepared loaders (or steps of ``progress``) in the current loop, from 0.
        total: batches in the current loop; -1 if unknown.
        epoch: number of the current or last loop over a training loader, from 1; 0 before the first.
        samples: samples seen by this rank since the start.
        loss: last loss; None before the first.
        losses: all losses, as means.
        step_time_s: ``monotonic()`` of the last step; 0.0 before the first. Comparable across the processes on a host.
        interrupts: number of SIGINTs that the worker's Python code has received.
        built_bytes: bytes of parameters that the worker has built instead of receiving them.
        device_bytes: device memory that the rank uses; 0 if unknown.
        device_peak_bytes: peak of ``device_bytes``.
        device_limit_bytes: total memory of the device; 0 if unknown.
        busy_time_s: seconds in which the rank was not waiting for others, from the end of each backward pass to the end
            of the next.
        busy_steps: number of steps that ``busy_time_s`` covers.
        num_updates: steps of any optimizer.
        num_progress_signs: other signs of progress: collectives, bars that advanced.
        num_checks: number of checks of ``accelerator.should_stop``.
        num_epochs: total number of epochs; 0 if unknown.
        loop: number of the current loop, from 1; 0 before the first.
        trained: step, total and epoch at the end of the last training loop; zeros before the first ends.
        steps_done: steps in all loops since the start.
        job_steps: completed and total optimizer steps of the whole training run, if a framework counts them; otherwise
            zeros.
    """

    rank: int
    state: WorkerState = WorkerState.STARTING
    step: int = 0
    total: int = -1
    epoch: int = 0
    samples: int = 0
    loss: float | None = None
    losses: LossCurve = NO_LOSSES
    step_time_s: float = 0.0
    interrupts: int = 0
    built_bytes: int = 0
    device_bytes: int = 0
    device_peak_bytes: int = 0
    device_limit_bytes: int = 0
    busy_time_s: float = 0.0
    busy_steps: int = 0
    num_updates: int = 0
    num_progress_signs: int = 0
    num_checks: int = 0
    num_epochs: int = 0
    loop: int = 0
    trained: tuple[int, int, int] = (0, 0, 0)
    steps_done: int = 0
    job_steps: tuple[int, int] = (0, 0)


class _Word:
    """A descriptor that makes an integer in a slot an attribute."""

    def __init__(self, index: int) -> None:
        self._index = index

    def __get__(self, slot: Slot | StepBoundaries, owner: object = None) -> int:
        value: int = slot._ints[self._index]
        return value

    def __set__(self, slot: Slot | StepBoundaries, value: int) -> None:
        slot._ints[self._index] = value


class StepBoundaries:
    """A rank's checks before each optimizer step; an interrupt is raised on all ranks at the same check.

    It has the same fields that a :class:`Slot` has for checks of ``accelerator.should_stop``.
    """

    num_checks = _Word(BOUNDARY_CHECKS)
    stop_reply = _Word(_BOUNDARY_REPLY)
    stop_proposal = _Word(BOUNDARY_PROPOSAL)
    stop_decision = _Word(_BOUNDARY_DECISION)

    def __init__(self, ints: memoryview) -> None:
        self._ints = ints

    def begin_check(self) -> tuple[int, int]:
        """Count a check; return its number, and the check at which the launcher proposes to stop (0 if none)."""
        ints = self._ints
        ints[BOUNDARY_CHECKS] = number = ints[BOUNDARY_CHECKS] + 1
        return number, ints[BOUNDARY_PROPOSAL]

    def begin_anew(self) -> None:
        """Restart the worker's count at 0, because ranks in a session need not have run the same code before."""
        self.num_checks = self.stop_reply = 0

    def clear_proposal(self) -> None:
        """Forget the last proposal; called by the launcher."""
        self.stop_proposal = self.stop_decision = 0


class Slot:
    """The writer's side: a rank's own slot. Its methods are fast enough to be called at every step."""

    epoch = _Word(_EPOCH)
    """Number of the current or last epoch, from 1; 0 before the first."""
    num_progress_signs = _Word(_PROGRESS_SIGNS)
    """Other signs of progress: collectives, bars that advanced, the start of a session's command."""
    built_bytes = _Word(_BUILT_BYTES)
    """Bytes of parameters that this process has built."""
    num_checks = _Word(_CHECKS)
    """How many times the rank has checked ``accelerator.should_stop``; set in a copy of another machine's slot."""
    stop_reply = _Word(_STOP_REPLY)
    """The worker's reply to a proposal to stop: the proposal's number, negated to reject it; 0 before the first."""
    stop_proposal = _Word(_STOP_PROPOSAL)
    """The check at which the launcher proposes to stop; 0 without a proposal. Written by the launcher."""
    keeps_weights = _Word(_KEEPS_WEIGHTS)
    """1 if the user is interrupting the rank, which then sends its trained states. Written by the launcher."""
    handing_over = _Word(_HANDING_OVER)
    """1 while the rank is waiting for others to read its tensors from queues. The launcher writes 0."""
    stop_decision = _Word(_STOP_DECISION)
    """The proposal once it is agreed on; its negation once it is withdrawn. Written by the launcher."""

    def __init__(
        self,
        memory: memoryview,
        call_memory: memoryview | None = None,
        span_memory: memoryview | None = None,
    ) -> None:
        self.call_memory = call_memory
        """Memory for the rank's last collectives; None if no process reads them."""
        self.span_memory = span_memory
        """Memory for the rank's time spans; None if no process reads them."""
        self.spans: SpanWriter | None = None
        """Records the rank's time spans; None before :meth:`record_spans`."""
        self.words: memoryview
        """The integers of the slot, for code that runs at every step, where a method call would be slow."""
        self.pack = _PROGRESS.pack_into
        """Writes the time of the last step, ``step``, ``steps_done`` and ``samples`` to ``memory`` at ``PROGRESS``."""
        self.note_step: Callable[[FrameType, bool], None] | None = None
        """Called before an optimizer's step, with the user's frame and whether the step has arguments."""
        self.record_step: Callable[[Any], None] | None = None
        """Called with an optimizer before its step; None while no collectives are recorded."""
        self.record_backward: Callable[[], None] | None = None
        """Called before a backward pass; None while no collectives are recorded."""
        self.local_gradients: Any = None
        """Reads gradients before ranks exchange them; None if collectives are not recorded."""
        self.counted: Any = None
        """The loop that has one iteration per step, valid until ``settled_until_s``; None if there is no such loop."""
        self.settled_until_s = 0.0
        """Time until which ``note_step`` need not be called (monotonic clock); 0 if loops have changed."""
        self._write_to(memory)

    def record_spans(self) -> None:
        """Record how the calling thread of the worker spends its time; do nothing if no process reads the spans."""
        if self.span_memory is not None:
            self.spans = SpanWriter(self.span_memory)

    def detach(self) -> None:
        """Write to private memory from now on, in a process that the rank has forked."""
        self._write_to(memoryview(bytearray(_SLOT_BYTES)))
        if self.spans is not None:
            self.spans.detach()

    def _write_to(self, memory: memoryview) -> None:
        self.memory = memory
        self._ints = self.words = memory.cast("q")
        self._doubles = memory.cast("d")
        # Keep copies of what this process has written, because reading a word of the board takes as long as writing it.
        _, self.step, self.steps_done, self.samples = _PROGRESS.unpack_from(memory, PROGRESS)
        self.updates = self._ints[UPDATES]
        self.boundaries = StepBoundaries(self._ints)
        self._ints[_TOTAL] = -1
        self._read_curve = (0, NO_LOSSES)

    @property
    def num_updates(self) -> int:
        """Steps of any optimizer; settable."""
        return self.updates

    @num_updates.setter
    def num_updates(self, number: int) -> None:
        self._ints[UPDATES] = self.updates = number

    @property
    def state(self) -> WorkerState:
        """The state of the rank."""
        return WorkerState(self._ints[_STATE])

    def set_state(self, state: WorkerState) -> None:
        """Set the state of the rank."""
        self._ints[_STATE] = state

    @property
    def loop(self) -> tuple[int, int, WorkerState, int, int, int]:
        """The displayed loop, as the arguments of :meth:`start_loop`."""
        ints = self._ints
        return (
            ints[_TOTAL],
            ints[_EPOCH],
            WorkerState(ints[_STATE]),
            self.step,
            ints[_LOOP],
            ints[_NUM_EPOCHS],
        )

    def clear_progress(self) -> None:
        """Forget loops and losses before a session's next command; keep counters that are compared over time."""
        self.start_loop(-1, 0, self.state)
        self.end_training(0, 0, 0)
        self.set_job_steps(0, 0)
        self.set_losses(NO_LOSSES)
        self._ints[_HAS_LOSS], self._doubles[_STEP_TIME] = 0, 0.0

    def start_loop(
        self, total: int, epoch: int, state: WorkerState, step: int = 0, number: int = 0, num_epochs: int = 0
    ) -> None:
        """Start a loop over a loader, or resume an outer one.

        Args:
            total: batches; -1 if unknown.
            epoch: as in :class:`SlotReading`.
            state: state of the rank in this loop.
            step: number of completed batches.
            number: number of the loop.
            num_epochs: as in :class:`SlotReading`.
        """
        ints = self._ints
        ints[_LOOP] = number
        ints[_NUM_EPOCHS] = num_epochs
        self.step = step
        self._show_progress()
        ints[_TOTAL] = total
        ints[_EPOCH] = epoch
        ints[_STATE] = state

    def end_training(self, step: int, total: int, epoch: int) -> None:
        """Record the end of a loop over a training loader."""
        ints = self._ints
        ints[_TRAINED_STEP], ints[_TRAINED_TOTAL], ints[_TRAINED_EPOCH] = step, total, epoch

    def set_job_steps(self, done: int, total: int) -> None:
        """Set the completed and the total number of optimizer steps of the whole training run."""
        ints = self._ints
        ints[_JOB_STEPS], ints[_JOB_TOTAL] = done, total

    def advance(self, samples: int = 0) -> None:
        """Count a batch of ``samples`` that the displayed loop hands to the user. Called at every step."""
        self.step += 1
        self.steps_done += 1
        self.samples += samples
        self._show_progress()

    def advance_to(self, step: int) -> None:
        """Set the number of batches that the displayed loop has handed to the user."""
        self.steps_done += step - self.step
        self.step = step
        self._show_progress()

    def _show_progress(self) -> None:
        self.pack(self.memory, PROGRESS, monotonic(), self.step, self.steps_done, self.samples)

    def count_step(self) -> None:
        """Count the step at which an outer loop resumed."""
        self._ints[_STEPS_DONE] = self.steps_done = self.steps_done + 1

    def count_samples(self, samples: int) -> None:
        """Count samples that a loop passed to the user while the loop was not displayed."""
        self._ints[_SAMPLES] = self.samples = self.samples + samples

    def set_loss(self, loss: float) -> None:
        """Set the last loss; it may be infinite or nan."""
        self._doubles[_LOSS] = loss
        self._ints[_HAS_LOSS] = 1

    def set_losses(self, curve: LossCurve) -> None:
        """Set the losses so far."""
        ints = self._ints
        ints[_CURVE_VERSION] += 1  # odd during the write
        ints[_CURVE_STEPS] = curve.num_steps
        ints[_CURVE_STEPS_PER_BIN] = curve.steps_per_bin
        ints[_CURVE_LENGTH] = len(curve.means)
        for index, mean in enumerate(curve.means, _FIRST_MEAN):
            self._doubles[index] = mean
        ints[_CURVE_VERSION] += 1

    def note_interrupt(self) -> None:
        """Count a SIGINT."""
        self._ints[_INTERRUPTS] += 1

    def add_busy_time(self, seconds: float, num_steps: int = 1) -> None:
        """Add the durations of steps, from one backward pass to the next, excluding waits for other ranks."""
        self._doubles[_BUSY_TIME] += seconds
        self._ints[_BUSY_STEPS] += num_steps

    def note_progress(self) -> None:
        """Count a sign of progress other than a step, such as the end of a collective or the advance of a bar."""
        self._ints[_PROGRESS_SIGNS] += 1

    def set_device_memory(self, taken: int, peak: int, limit: int = 0) -> None:
        """Set the device memory in bytes: used, peak, total (0 if unknown)."""
        ints = self._ints
        ints[_DEVICE_BYTES] = taken
        ints[_DEVICE_PEAK_BYTES] = peak
        ints[_DEVICE_LIMIT_BYTES] = limit

    def begin_check(self) -> tuple[int, int]:
        """Count a check of ``accelerator.should_stop``; return the same as :meth:`StepBoundaries.begin_check`."""
        ints = self._ints
        ints[_CHECKS] = number = ints[_CHECKS] + 1
        return number, ints[_STOP_PROPOSAL]

    def read(self, rank: int) -> SlotReading:
        """Read all fields as one reading; their values may be from different moments."""
        ints = self._ints
        return SlotReading(
            rank=rank,
            state=WorkerState(ints[_STATE]),
            step=ints[_STEP],
            total=ints[_TOTAL],
            epoch=ints[_EPOCH],
            samples=ints[_SAMPLES],
            loss=self._doubles[_LOSS] if ints[_HAS_LOSS] else None,
            losses=self._losses(),
            step_time_s=self._doubles[_STEP_TIME],
            interrupts=ints[_INTERRUPTS],
            built_bytes=ints[_BUILT_BYTES],
            device_bytes=ints[_DEVICE_BYTES],
            device_peak_bytes=ints[_DEVICE_PEAK_BYTES],
            device_limit_bytes=ints[_DEVICE_LIMIT_BYTES],
            busy_time_s=self._doubles[_BUSY_TIME],
            busy_steps=ints[_BUSY_STEPS],
            num_updates=ints[UPDATES],
            num_progress_signs=ints[_PROGRESS_SIGNS],
            num_checks=ints[_CHECKS],
            num_epochs=ints[_NUM_EPOCHS],
            loop=ints[_LOOP],
            trained=(ints[_TRAINED_STEP], ints[_TRAINED_TOTAL], ints[_TRAINED_EPOCH]),
            steps_done=ints[_STEPS_DONE],
            job_steps=(ints[_JOB_STEPS], ints[_JOB_TOTAL]),
        )

    def _losses(self) -> LossCurve:
        """Read the curve; return the previous object if the curve has not changed."""
        ints = self._ints
        for _ in range(_MAX_READS):
            version = ints[_CURVE_VERSION]
            if version == self._read_curve[0]:
                break
            means = tuple(self._doubles[_FIRST_MEAN : _FIRST_MEAN + ints[_CURVE_LENGTH]])
            curve = LossCurve(ints[_CURVE_STEPS], ints[_CURVE_STEPS_PER_BIN], means)
            self._read_curve = (version, curve)
            if version % 2 == 0 and version == ints[_CURVE_VERSION]:
                break
        return self._read_curve[1]

    def release(self) -> None:
        """Release the memory; the slot can no longer be used."""
        for memory in (self.call_memory, self.span_memory):
            if memory is not None:
                memory.release()
        for view in (self._ints, self._doubles, self.memory):
            view.release()


def private_slot() -> Slot:
    """Return a slot without a board, so that processes without a launcher run the same code."""
    return Slot(memoryview(bytearray(_SLOT_BYTES)))


class Board:
    """All slots of a job, in a memory file that forked and fresh workers alike can map by its descriptor."""

    def __init__(self, num_slots: int, fd: int) -> None:
        self.fd = fd
        starts = _region_starts(num_slots)
        self._map = mmap.mmap(fd, starts[-1])
        self._view = memoryview(self._map)
        sizes = (_SLOT_BYTES, REGION_BYTES, spans.REGION_BYTES)
        self._slots = [
            Slot(
                *(
                    self._view[start + rank * size : start + (rank + 1) * size]
                    for start, size in zip(starts, sizes, strict=False)
                )
            )
            for rank in range(num_slots)
        ]
        self._calls: dict[int, CallReader] = {}
        self._spans: dict[int, SpanReader] = {}

    @classmethod
    def create(cls, num_slots: int) -> Board:
        """Create a board in its own memory file."""
        fd = descriptors.moved_high(create_memory_file("nblaunch-board"))
        try:
            os.ftruncate(fd, _region_starts(num_slots)[-1])
            return cls(num_slots, fd)
        except OSError:  # mapping it takes another descriptor
            os.close(fd)
            raise

    def slot(self, rank: int) -> Slot:
        """Return the slot of a rank."""
        return self._slots[rank]

    def read(self) -> list[SlotReading]:
        """Read all slots, in rank order."""
        return [slot.read(rank) for rank, slot in enumerate(self._slots)]

    def calls(self, rank: int) -> CallReader:
        """Return the reader of a rank's last collectives."""
        if rank not in self._calls:
            memory = self._slots[rank].call_memory
            assert memory is not None, "each slot of a board has memory for them"
            self._calls[rank] = CallReader(memory[:])
        return self._calls[rank]

    def spans(self, rank: int) -> SpanReader:
        """Return the reader of a rank's time spans."""
        if rank not in self._spans:
            memory = self._slots[rank].span_memory
            assert memory is not None, "each slot of a board has memory for them"
            self._spans[rank] = SpanReader(memory[:])
        return self._spans[rank]

    def close(self) -> None:
        """Release the memory and its descriptor."""
        readers: list[CallReader | SpanReader] = [*self._calls.values(), *self._spans.values()]
        for reader in readers:
            reader.release()
        self._calls, self._spans = {}, {}
        for slot in self._slots:
            slot.release()
        self._slots = []
        self._view.release()
        self._map.close()  # the mapping has its own descriptor
        os.close(self.fd)
        self.fd = -1


def _region_starts(num_slots: int) -> list[int]:
    """Return the offsets of the slots, calls and spans, which start on new pages, and the offset of the end."""
    starts = [0]
    for size in (_SLOT_BYTES, REGION_BYTES, spans.REGION_BYTES):
        starts.append(starts[-1] + -(-num_slots * size // 4096) * 4096)
    return starts


def create_memory_file(name: str) -> int:
    """Open an empty file that exists only in memory and vanishes with its last user.

    ``memfd_create`` is not limited by the size of ``/dev/shm``, which containers set to 64 MB.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC)
    fd, path = tempfile.mkstemp(prefix=name)  # macOS has no memfd, so use an unlinked file
    os.unlink(path)
    return fd
