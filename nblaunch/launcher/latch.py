"""Latch: lets threads wait for something that happens once."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress


class Latch:
    """Like ``threading.Event``, but an interrupt at any line of :meth:`wait` leaves it intact.

    An event guards its state with a lock. A KeyboardInterrupt at certain lines of its ``wait`` leaves this lock locked,
    and then ``set`` never returns. Here each call to :meth:`wait` has its own lock.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: deque[threading.Lock] = deque()

    def is_set(self) -> bool:
        """Return whether :meth:`set` was called."""
        return self._is_set

    def set(self) -> None:
        """Wake all threads that wait; later calls to :meth:`wait` return at once."""
        self._is_set = True
        with suppress(IndexError):
            while True:
                self._waiting.popleft().release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds (None = no limit); return whether :meth:`set` was called."""
        lock = threading.Lock()
        lock.acquire()
        self._waiting.append(lock)  # before the check, so that set() can't miss it
        if not self._is_set:
            lock.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
        with suppress(ValueError, IndexError):  # set() has removed the lock, or is removing others
            self._waiting.remove(lock)
        return self._is_set
