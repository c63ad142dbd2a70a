"""Optimizer steps: counted on the board, and never split by an interrupt.

Parameters change only in optimizer steps. After an interrupt between two steps, a model has the weights from the last
complete step. An interrupt during a step is held until the step ends, but for at most :data:`HOLD_S`, because a step
may wait for another rank, or run a closure over a whole dataset.

    handler of SIGINT ── is_held(frame)? ──> no: raises KeyboardInterrupt
                                        └──> yes: the hook after the step raises it
    proposal on the board ── before each step ──> all ranks agree on a step: the hook before it raises the interrupt

The process has one state, because it has one SIGINT handler and one list of torch's hooks.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from nblaunch import packages
from nblaunch.backends import process_group
from nblaunch.wire import stop_agreement
from nblaunch.wire.board import (
    BOUNDARY_CHECKS,
    BOUNDARY_PROPOSAL,
    PROGRESS,
    UPDATES,
    Slot,
)
from nblaunch.wire.spans import SpanKind, start_of

_OPTIMIZER = start_of(SpanKind.OPTIMIZER)

HOLD_S = 1.0
"""How long a step may delay an interrupt."""


class OptimizerSteps:
    """The optimizer steps of this process, and the interrupts that they delay.

    Attributes:
        num_done: number of steps that have ended. A step inside another optimizer's step does not count separately.
        is_cut: whether an interrupt was raised inside a step, and no step has ended since.
        raise_interrupt: raises a KeyboardInterrupt that was delayed, or that all ranks have agreed on.
    """

    def __init__(self) -> None:
        self.num_done = 0
        self.is_cut = False
        self._active: Any = None
        self._began_s = 0.0
        self._held_since_s: float | None = None
        self.raise_interrupt: Callable[[], None] = _raise_interrupt
        self._is_reminded = False
        self._num_sent = 0

    # --- hooks of torch ----------------------------------------------------------------------------------------------

    def count_on(self, slot: Slot) -> None:
        """Count steps on ``slot`` from now on, even if torch is imported later."""
        packages.observe_when_imported("torch.optim.optimizer", lambda module: self.watch(module, slot))

    def watch(self, module: Any, slot: Slot) -> None:
        """Set the hooks of :meth:`count_on`. ``module`` is ``torch.optim.optimizer``."""
        import torch

        monotonic, get_ident = time.monotonic, threading.get_ident
        main_thread = threading.main_thread().ident
        c10d: Any = None

        def begin(optimizer: Any, args: Any, kwargs: Any) -> None:
            # torch's import may not be complete when this hook is set, so torch's parts are looked up in every step.
            if torch.compiler.is_dynamo_compiling():
                return
            if slot.record_step is not None:
                slot.record_step(optimizer)
            if self._active is not None and self._is_nested(optimizer):
                return
            words = slot.words
            words[BOUNDARY_CHECKS] = number = words[BOUNDARY_CHECKS] + 1
            proposal = words[BOUNDARY_PROPOSAL]
            if proposal and stop_agreement.holds(slot.boundaries, number, proposal):
                self._stop_here()
            self._active = optimizer
            self._began_s = now_s = monotonic()
            if now_s >= slot.settled_until_s or len(args) > 1 or kwargs:
                if slot.note_step is not None:
                    slot.note_step(sys._getframe(2), len(args) > 1 or bool(kwargs))
                return
            loop = slot.counted
            if loop is not None and get_ident() == main_thread:  # inlines ``LoopStack.advance``
                loop.step = done = loop.step + 1
                slot.step = step = slot.step + 1
                slot.steps_done = steps_done = slot.steps_done + 1
                slot.pack(slot.memory, PROGRESS, now_s, step, steps_done, slot.samples)
                if done == loop.total:
                    slot.settled_until_s = 0.0

        def end(optimizer: Any, args: Any, kwargs: Any) -> None:
            if torch.compiler.is_dynamo_compiling():  # a compiled step must not access foreign memory
                return
            slot.words[UPDATES] = slot.updates = slot.updates + 1
            nonlocal c10d
            if c10d is None and hasattr(sys.modules.get("torch.distributed.distributed_c10d"), "_pg_map"):
                c10d = sys.modules["torch.distributed.distributed_c10d"]
            groups = None if c10d is None else c10d._pg_map
            if groups is None or (groups and not groups.keys() <= process_group.kept):
                process_group.keep_groups()
            if self._active is optimizer:
                if slot.spans is not None:
                    slot.spans.write(_OPTIMIZER, self._began_s, monotonic())
                self._active = None
                self.num_done += 1
                self.is_cut = False
                if self._held_since_s is not None:
                    self._held_since_s = None
                    self.raise_interrupt()

        module.register_optimizer_step_pre_hook(begin)
        module.register_optimizer_step_post_hook(end)

    def _is_nested(self, optimizer: Any) -> bool:
        """Return whether the step that is beginning is part of another optimizer's step.

        Called by the hook before a step.
        """
        # Look at the frames, because a step that raised an exception stays marked as active.
        return self._active is not optimizer and _is_in_step(sys._getframe(3))

    def _stop_here(self) -> None:
        """Raise the interrupt before a step, as all ranks do, and send it to this process's children."""
        self._active = None
        self._num_sent += 1
        os.killpg(os.getpgrp(), signal.SIGINT)
        self.raise_interrupt()

    # --- the handler of SIGINT ---------------------------------------------------------------------------------------

    def is_held(self, frame: FrameType | None) -> bool:
        """Return whether an interrupt must wait, given the ``frame`` that the signal interrupted."""
        if self._num_sent:
            self._num_sent -= 1
            return True  # _stop_here, which sent it, raises the interrupt
        if self._is_reminded:
            self._is_reminded = False
            if self._held_since_s is None:
                return True  # the hook after the step has already raised it
        if not _is_in_step(frame):
            self._held_since_s = None
            return False
        now = time.monotonic()
        if self._held_since_s is None:
            self._held_since_s = now
            # Don't use ``threading``: its lock may be held when the signal arrives.
            _thread.start_new_thread(self._remind, (now,))
            return True
        if now - self._held_since_s < HOLD_S:
            return True
        self._held_since_s = None
        self.is_cut = True
        return False

    def _remind(self, since_s: float) -> None:
        """Interrupt the main thread again if the step that is delaying an interrupt takes too long."""
        time.sleep(HOLD_S)
        if self._held_since_s == since_s:
            self._is_reminded = True
            # Send the signal to the main thread, because its system call would otherwise continue.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def reset_in_subprocess(self) -> None:
        """Forget a delayed interrupt in a process that was forked from the worker."""
        self._held_since_s = None


def _raise_interrupt() -> None:
    raise KeyboardInterrupt


def _is_in_step(frame: FrameType | None) -> bool:
    """Return whether ``frame`` or one of its callers is torch's wrapper around an optimizer step."""
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_globals.get("__name__") == "torch.optim.optimizer":
            return True
        frame = frame.f_back
    return False


steps = OptimizerSteps()
"""The optimizer steps of this process."""
