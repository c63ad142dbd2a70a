"""What people ask of a running job: stop, interrupt, kill, show stacks. From a signal handler, a button, a thread."""

from __future__ import annotations

import os
import signal
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from nblaunch.errors import LaunchError
from nblaunch.wire import descriptors


class StopRequests:
    """Counts requests and wakes the supervisor's wait loop. Safe in signal handlers and any thread."""

    def __init__(self) -> None:
        try:
            self._reading, self._writing = os.pipe()
        except OSError as error:
            raise LaunchError(
                f"the system refused a pipe: {error}. If descriptors ran out (ulimit -n), close some."
            ) from error
        os.set_blocking(self._reading, False)
        os.set_blocking(self._writing, False)
        descriptors.keep_from_children(self._reading, self._writing)
        self._is_closed = False
        self.interrupts = 0
        self.terminations = 0
        self.termination_grace_s = 0.0
        self.is_cancelled = False
        self.wants_stop = False
        self.stack_queries: deque[Future[str]] = deque()

    def fileno(self) -> int:
        """A descriptor that can be read once somebody has asked for something: for ``select``."""
        return self._reading

    def interrupt(self) -> None:
        """Once: ask workers to end, with grace. Twice: kill them."""
        self.interrupts += 1
        self._wake()

    def terminate(self, grace_s: float) -> None:
        """Once: let the loops end, and interrupt them when ``grace_s`` is over. Again: interrupt at once."""
        self.termination_grace_s = grace_s
        self.terminations += 1
        if self.terminations > 1:
            self.interrupts += 1
        self._wake()

    def stop(self) -> None:
        """Let the loops of all ranks end at the same step boundary."""
        self.wants_stop = True
        self._wake()

    def ask_stacks(self) -> Future[str]:
        """Ask where every rank is; the supervisor fulfils the future within a second."""
        query: Future[str] = Future()
        self.stack_queries.append(query)
        self._wake()
        if self._is_closed:
            self._answer_rest()
        return query

    def cancel(self) -> None:
        """Kill the workers at once."""
        self.is_cancelled = True
        self._wake()

    def acknowledge(self) -> None:
        """Empty the pipe that woke the loop."""
        try:
            os.read(self._reading, 4096)
        except BlockingIOError:
            return

    def close(self) -> None:
        """No request can arrive any more."""
        self._is_closed = True
        descriptors.close(self._reading, self._writing)
        self._answer_rest()

    def _answer_rest(self) -> None:
        while self.stack_queries:
            self.stack_queries.popleft().set_result("no worker runs any more")

    def _wake(self) -> None:
        if self._is_closed:
            return
        try:
            os.write(self._writing, b"!")
        except BlockingIOError:
            return  # full: the loop has been woken often enough


@contextmanager
def interrupts_as_requests(requests: StopRequests) -> Iterator[None]:
    """While the block runs, SIGINT is a request to ``requests`` rather than an exception at a random line.

    Only the main thread can do this; elsewhere nothing changes. The former handler is always put back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda signum, frame: requests.interrupt())
    try:
        yield
    finally:
        # getsignal() of a handler that was not set from Python is None, which signal() does not take back.
        signal.signal(signal.SIGINT, before if before is not None else signal.default_int_handler)
