"""Signal handlers of this process, held back while the launcher is between two consistent states.

Python can call a handler between any two lines of the main thread. A handler that raises an exception, such as a
SIGALRM handler that limits a cell's running time, would leave the launcher in an inconsistent state: with unwatched
workers, a lock that is never released, or a half-loaded model.

    with held_back():        arriving signals are only recorded
        run_arrived()        calls their handlers here, where an exception does no harm
                             and the rest are called when the block ends

A signal mask is not enough, because the system would deliver the signal to another thread of the kernel, and Python
would still call the handler in the main thread.
"""

from __future__ import annotations

# signal.getsignal() tries to convert each handler to an enum, which takes thirty times as long.
import _signal  # type: ignore[import-not-found]
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

_NUMBERS = tuple(sorted(signal.valid_signals()))

_handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
"""The handlers that :func:`_note` replaces, by signal."""

_arrived: deque[int] = deque()
_outermost: held_back | None = None
"""The block that holds handlers back; None if they are called immediately."""


class held_back:
    """Holds back Python's signal handlers inside ``with held_back():`` blocks, which may be nested.

    When the outermost block ends, it calls the held-back handlers, each once and in the order of their signals. Nothing
    happens outside the main thread, because Python calls no handlers in other threads.

    This class does not use ``contextmanager``, which would run its own lines after handlers are released.
    """

    def __enter__(self) -> None:
        global _outermost
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            if _outermost is None:
                _outermost = self
                _take_out()
        except BaseException:  # raised by a handler that was not held back yet
            self._end()
            raise

    def __exit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> None:
        global _outermost
        if _outermost is not self:
            return
        try:
            # From here on, handlers are called immediately, including those that are not restored yet.
            _outermost = None
            _put_back()
        except BaseException:  # raised by a handler
            _put_back()
            raise
        run_arrived()


def run_arrived() -> None:
    """In the main thread, call the handlers of the signals that have arrived since handlers were held back.

    Raises:
        BaseException: a handler raised it. The next call continues with the handlers after it.
    """
    if _arrived and threading.current_thread() is threading.main_thread():
        while _arrived:
            number = _arrived.popleft()
            _handlers[number](number, sys._getframe(1))


def take(number: int) -> bool:
    """Drop a signal that has arrived while its handler is held back; return whether there was one."""
    if number not in _arrived:
        return False
    _arrived.remove(number)
    return True


def _note(number: int, frame: FrameType | None) -> Any:
    if _outermost is None:
        return _handlers[number](number, frame)
    if number not in _arrived:
        _arrived.append(number)
    return None


def _take_out() -> None:
    """Replace all handlers that were set from Python with :func:`_note`."""
    for number in _NUMBERS:
        handler = _signal.getsignal(number)
        if callable(handler) and handler is not _note:
            _handlers[number] = handler
            signal.signal(number, _note)


def _put_back() -> None:
    """Restore the handlers, except those that were set in the block."""
    for number, handler in list(_handlers.items()):
        if _signal.getsignal(number) is _note:
            signal.signal(number, handler)


def _let_go_in_child() -> None:
    """Restore the parent's handlers in a forked child, which is not in the parent's critical block."""
    global _outermost
    if _outermost is not None:
        _outermost = None
        _arrived.clear()
        _put_back()


os.register_at_fork(after_in_child=_let_go_in_child)
