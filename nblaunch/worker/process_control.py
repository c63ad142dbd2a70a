"""Control of a worker process: POSIX session, death of the parent, interrupts, faulthandler."""

from __future__ import annotations

import _thread
import ctypes
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import CodeType, FrameType
from typing import Any

from nblaunch.wire.assignment import NATIVE_STACKS_SIGNAL, NUM_THREADS, STACKS_SIGNAL
from nblaunch.wire.board import Slot
from nblaunch.worker.optimizer_steps import steps

_OOM_SCORE = 500
_PR_SET_PDEATHSIG = 1  # source: prctl(2), <linux/prctl.h>

_process = ctypes.CDLL(None)
if sys.platform == "linux":
    _process.prctl  # noqa: B018 looked up here once, in the kernel, instead of in every worker

BLOCKED_DURING_START = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
"""Signals that are blocked while workers are being started, so that no worker runs the kernel's handlers."""


_BEGIN_S = 0.05
"""How long an interrupt that arrives outside the function is held before it is sent again."""


class FunctionBounds:
    """Distinguishes interrupts in the user's function from interrupts in the few lines before and after it.

    If an exception were raised after the function has returned, the function's value would be lost. An interrupt that
    arrives outside the function is therefore held and sent again after a moment, until it arrives in the function; if
    the block has ended by then, the interrupt is dropped.

    Args:
        caller: code that calls the function.
        owner: code that contains the block in which interrupts are raised, and that calls ``caller``.
    """

    def __init__(self, caller: CodeType, owner: CodeType) -> None:
        self._caller = caller
        self._owner = owner
        self._is_pending = False
        self._is_again = False

    def is_held(self, frame: FrameType | None) -> bool:
        """Return whether an interrupt must wait, given the ``frame`` that the signal interrupted."""
        is_again, self._is_again = self._is_again, False
        inner = None
        while frame is not None:
            if frame.f_code is self._caller and (inner is not None or is_again):
                self._is_pending = False
                # The second time, the function may also be running C code without a frame, such as time.sleep.
                return False
            if frame.f_code is self._caller or frame.f_code is self._owner:
                self._is_pending = True
                _thread.start_new_thread(self._send_again, ())  # as in optimizer_steps.py
                return True
            inner, frame = frame, frame.f_back
        return False  # for example, the frame belongs to a greenlet

    def leave(self) -> None:
        """Drop a held interrupt, because the block is over and the function has returned."""
        self._is_pending = False

    def _send_again(self) -> None:
        time.sleep(_BEGIN_S)
        if not self._is_pending:
            return
        self._is_pending, self._is_again = False, True
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


class Interrupts:
    """Turns SIGINT into ``KeyboardInterrupt``, but only inside ``with interrupts:``, around the user's code.

    If an interrupt arrives before the block, it is raised when the block begins. An interrupt after the block is only
    counted and never interrupts the worker's own code. An interrupt during an optimizer step is raised when the step
    ends (``optimizer_steps.py``). The object must be created in the main thread, and handles SIGINT from then on.

    This class does not use ``contextmanager``, which sets an attribute on exceptions that pass through it; a
    user's exception may not allow that.

    Args:
        slot: slot of the worker.
        bounds: where the user's function begins and ends, so that an interrupt after its return does not discard the
            return value.
    """

    def __init__(self, slot: Slot, bounds: FunctionBounds) -> None:
        self._slot = slot
        self._bounds = bounds
        self._are_raised = False
        self._is_pending = False
        signal.signal(signal.SIGINT, self._on_signal)

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        # The launcher reads this count: a worker that has noticed the interrupt gets its full grace period, but a
        # worker that is stuck in C code may get less.
        self._slot.note_interrupt()
        if not self._are_raised:
            self._is_pending = True
        elif not steps.is_held(frame) and not self._bounds.is_held(frame):
            raise KeyboardInterrupt

    def reset_in_subprocess(self) -> None:
        """Forget the worker's interrupts in a process that was forked from it."""
        self._is_pending = False
        steps.reset_in_subprocess()
        if not _forked_by_main_thread:
            self._are_raised = True  # the main thread, which may delay them, is not in this process

    def __enter__(self) -> None:
        try:
            self._are_raised = True
            if self._is_pending:
                self._is_pending = False
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            self._are_raised = False
            raise

    def __exit__(self, *error: object) -> None:
        self._are_raised = False
        self._bounds.leave()


class ChildHandler:
    """The user code's SIGCHLD handler, which ``with handler:`` installs only while that code runs.

    torch's data loaders install a handler that raises an error when one of their processes dies. Outside the block, the
    error would interrupt the worker's own code, for example while the worker reports that failure.
    """

    def __init__(self) -> None:
        self._handler: Any = signal.SIG_DFL

    def __enter__(self) -> None:
        if self._handler:
            signal.signal(signal.SIGCHLD, self._handler)
            self._handler = signal.SIG_DFL

    def __exit__(self, *error: object) -> None:
        try:
            self.take_out()
        except BaseException:  # raised by the handler, which Python may call before take_out
            self.take_out()
            raise

    def take_out(self) -> None:
        """Remove the current handler and keep it for the next block. A handler that C code installed is not removed."""
        if handler := signal.getsignal(signal.SIGCHLD):
            self._handler = handler
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block signals while a new process starts, before it sets its own handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_DURING_START)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def lead_posix_session() -> None:
    """Start a new POSIX session and process group, because Jupyter signals the kernel's whole process group."""
    if os.getsid(0) != os.getpid():
        os.setsid()


def end_with_parent(parent_pid: int, *, with_children: bool = True) -> None:
    """Have the system kill this process when the thread that started it ends, and do the same for the children that it
    forks later.

    macOS lacks this system call. There, only the launcher's guardian process kills the workers.

    Args:
        parent_pid: pid of the parent, to detect that the parent has already ended.
        with_children: whether to do the same for its children.
    """
    if sys.platform != "linux":
        return
    _kill_on_parent_death()
    if os.getppid() != parent_pid:
        os._exit(1)  # the parent died before the call above could take effect
    if with_children:
        os.register_at_fork(
            before=_remember_forking_thread, after_in_child=partial(_end_with_worker, os.getpid())
        )


@contextmanager
def ending_with(fd: int) -> Iterator[None]:
    """End this process if the other end of a pipe closes during the block, which spends seconds on imports.

    The watching thread ends with the block, before ranks are forked.
    """
    is_over, over = os.pipe()

    def watch() -> None:
        poller = select.poll()
        poller.register(fd, select.POLLHUP | getattr(select, "POLLRDHUP", 0))
        poller.register(is_over, select.POLLIN)
        if is_over not in {ready for ready, _ in poller.poll()}:
            os._exit(1)

    thread = threading.Thread(target=watch, name="nblaunch-launcher", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(over, b"x")
        thread.join()
        os.close(over)
        os.close(is_over)


def prefer_for_oom_kill() -> None:
    """When memory runs out, have the system kill a worker rather than the kernel, which holds all the user's data.

    A process may raise its own score without privileges. Source: proc_pid_oom_score_adj(5).
    """
    try:
        fd = os.open("/proc/self/oom_score_adj", os.O_RDWR)
    except OSError:
        return  # without this file, the system chooses which process to kill
    try:
        if int(os.read(fd, 16)) < _OOM_SCORE:
            os.write(fd, str(_OOM_SCORE).encode())
    except OSError:
        return  # not allowed here; the system chooses which process to kill
    finally:
        os.close(fd)


def reset_signals() -> None:
    """Restore the signal handling of a fresh process, because the kernel's handlers must not run in a worker."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)


def unblock_signals() -> None:
    """Unblock the signals that were blocked around the fork."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_DURING_START)


def watch_faults(stacks_path: str) -> None:
    """Write all Python stacks to a file on a crash, and the main thread's stack when the launcher requests it by
    signal.

    Python handles the first signal between two of its instructions. If no reply comes, the launcher sends a
    second signal, which faulthandler handles. faulthandler works even while the interpreter is blocked in C
    code, which is when a stack is most useful. But it takes no lock and may crash the process if frames
    change in the meantime (Python 3.11 keeps a frame in its list while it frees the frame's code). For that reason, the
    launcher uses faulthandler only if Python does not reply, and faulthandler reads only the stack of the thread that
    the signal interrupts. The system chooses the main thread, which runs the function (kernel/signal.c,
    ``complete_signal``).
    """
    # The descriptor must stay open, because faulthandler writes to it in a signal handler.
    fd = os.open(stacks_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.enable(file=fd, all_threads=True)
    _answer_with_stack(fd)


def _answer_with_stack(fd: int) -> None:
    def answer(signum: int, frame: object) -> None:
        faulthandler.dump_traceback(fd, all_threads=False)
        os.write(fd, f"{NUM_THREADS}{len(sys._current_frames())}\n".encode())

    signal.signal(STACKS_SIGNAL, answer)
    signal.siginterrupt(STACKS_SIGNAL, False)  # otherwise system calls of native code would fail with EINTR
    faulthandler.register(NATIVE_STACKS_SIGNAL, file=fd, all_threads=False, chain=False)


def watch_faults_of_subprocess() -> None:
    """Let a process that was forked from the worker write its stacks to the log.

    Only the rank itself writes to its stack file.
    """
    if faulthandler.is_enabled():
        faulthandler.enable(file=2, all_threads=True)
    _answer_with_stack(2)


def _kill_on_parent_death() -> None:
    _process.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


_forked_by_main_thread = False


def _remember_forking_thread() -> None:
    global _forked_by_main_thread
    _forked_by_main_thread = threading.current_thread() is threading.main_thread()


def _end_with_worker(pid: int) -> None:
    """Make the worker's children, such as data loader processes, die with it, but not its grandchildren, which may be
    daemons.

    The signal comes when the forking *thread* ends, so only children of the main thread are covered.
    """
    if _forked_by_main_thread and os.getppid() == pid:
        _kill_on_parent_death()
