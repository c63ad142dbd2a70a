"""Signal handlers of this process, held back while the launcher is between two states.

Python calls a handler between any two lines of the main thread. One that raises, as the handler of SIGALRM does that
limits the time of a cell, would leave the launcher there: with unwatched workers, a lock that is never
released, a model of which a half is loaded.

    with held_back():        handlers of all signals are noted
        run_arrived()        they are called here, where an exception does no harm
                             and at the end of the block

A mask of signals does not do this: the system gives a signal to another thread of the kernel then, and Python calls the
handler in the main thread all the same.
"""

from __future__ import annotations

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
"""The handlers that :func:`_note` stands in for, by signal."""

_arrived: deque[int] = deque()
_outermost: held_back | None = None
"""The block that holds handlers back; None if they are called at once."""


class held_back:
    """Hold Python's signal handlers back in ``with held_back():``, which may be nested.

    They are called in the order of their signals when the outermost block ends, each once. Nothing happens outside of
    the main thread, where Python calls no handler.

    This class does not use ``contextmanager``, which would run lines of its own once handlers are no longer held back.
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
            _outermost = (
                None  # from here on handlers are called at once, also those that are not put back yet
            )
            _put_back()
        except BaseException:  # raised by a handler
            _put_back()
            raise
        run_arrived()


def run_arrived() -> None:
    """Call the handlers of signals that have arrived since handlers are held back, in the main thread.

    Raises:
        BaseException: a handler raised it. The handlers behind that one are called the next time.
    """
    if _arrived and threading.current_thread() is threading.main_thread():
        while _arrived:
            number = _arrived.popleft()
            _handlers[number](number, sys._getframe(1))


def take(number: int) -> bool:
    """Return whether a signal has arrived whose handler is held back; the handler is not called for it any more."""
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
    """Put :func:`_note` in the place of all handlers that were set from Python."""
    for number in _NUMBERS:
        handler = signal.getsignal(number)
        if callable(handler) and handler is not _note:
            _handlers[number] = handler
            signal.signal(number, _note)


def _put_back() -> None:
    """Put the handlers back; one that was set in the block stays."""
    for number, handler in list(_handlers.items()):
        if signal.getsignal(number) is _note:
            signal.signal(number, handler)


def _let_go_in_child() -> None:
    """Give a forked child the handlers of its parent: what the parent does at present is not the child's task."""
    global _outermost
    if _outermost is not None:
        _outermost = None
        _arrived.clear()
        _put_back()


os.register_at_fork(after_in_child=_let_go_in_child)
