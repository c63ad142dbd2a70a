"""Interrupts of a session's commands in a rank.

kernel ── SIGINT, repeatedly ──> main thread: raises KeyboardInterrupt once, in the command's code
kernel ── LeaveGroup ──────────> debugger's thread: if the main thread does not notice SIGINT because it waits in
                                 native code, disconnects its groups; the wait then fails
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from nblaunch.backends import process_group
from nblaunch.worker.optimizer_steps import steps
from nblaunch.worker.process_control import FunctionBounds

_LOOK_S = 0.1
"""How long the main thread may take to notice an interrupt."""

_COMPUTING = 0.05
"""Share of this time for which native code that computes uses the processor, and native code that waits does not."""


class CommandInterrupts:
    """Raises each command's interrupt in the main thread. The object must be created in that thread.

    Args:
        bounds: where a function that a command calls begins and ends.
    """

    def __init__(self, bounds: FunctionBounds) -> None:
        self._bounds = bounds
        self._pid = os.getpid()
        self._main = threading.main_thread().ident or 0
        self._is_allowed = False
        self._is_raised = False
        self._num_noticed = 0
        self._report_ignored = sys.unraisablehook
        sys.unraisablehook = self._on_ignored
        steps.raise_interrupt = self._raise
        signal.signal(signal.SIGINT, self._on_signal)

    def allow(self) -> None:
        """Raise an interrupt from now on, once: the command's code begins."""
        self._is_allowed = True

    def hold(self) -> None:
        """Raise no interrupt from now on, because sending results must not be interrupted."""
        self._is_allowed = self._is_raised = False

    def free_if_stuck(self) -> None:
        """Disconnect this rank's groups if the main thread waits in native code, where it can't raise an interrupt.

        Do nothing after the interrupt was raised: the code may be saving a checkpoint together with other ranks. Called
        in another thread.
        """
        if not self._is_allowed:
            return
        num_noticed, cpu_s = self._num_noticed, self._cpu_s()
        signal.pthread_kill(self._main, signal.SIGINT)
        time.sleep(_LOOK_S)
        is_computing = self._cpu_s() - cpu_s > _COMPUTING * _LOOK_S
        if self._is_allowed and self._num_noticed == num_noticed and not is_computing:
            with suppress(OSError):  # no descriptor is left to list the others
                process_group.disconnect()

    def _cpu_s(self) -> float:
        """Return the processor time of the main thread; 0 if this system does not report it."""
        clock = getattr(time, "pthread_getcpuclockid", None)
        return 0.0 if clock is None else time.clock_gettime(clock(self._main))

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            raise KeyboardInterrupt  # in a process that the code forked
        self._num_noticed += 1
        if frame is not None and frame.f_code is CommandInterrupts._on_ignored.__code__:
            return  # Python would ignore the exception there, too; the kernel sends the interrupt again
        if not steps.is_held(frame) and self._is_allowed and not self._bounds.is_held(frame):
            self._raise()

    def _raise(self) -> NoReturn:
        self._is_allowed, self._is_raised = False, True
        raise KeyboardInterrupt

    def _on_ignored(self, ignored: Any) -> None:
        """Raise the interrupt again if Python ignored it, as in a ``__del__`` method."""
        self._report_ignored(ignored)
        is_own = os.getpid() == self._pid and threading.get_ident() == self._main
        if is_own and self._is_raised and issubclass(ignored.exc_type, KeyboardInterrupt):
            self._is_allowed, self._is_raised = True, False
