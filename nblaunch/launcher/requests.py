"""Requests to a running job, from signal handlers, buttons and threads.

    stop()         ``accelerator.should_stop`` becomes true at the same step on all ranks; loops that read it end
    terminate(s)   stop, and interrupt after ``s`` seconds; the second call interrupts at once
    interrupt()    KeyboardInterrupt in all workers; the second call kills them
    cancel()       kills all workers
    pass_on(n)     sends signal ``n`` to the workers that handle it
    ask_stacks()   returns the position of every rank, as text
    ask_logs()     shows all output so far, as after a session's command

    any thread, any signal handler ── counts, flags, queries ─────> JobRequests <── the supervisor reads
                                   └─ one byte ──> WakePipe ─────────────────────> wakes its wait loop

A signal handler may interrupt any line of this module, so nothing here takes a lock: requests are single appends and
assignments, which are atomic in the interpreter.
"""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from nblaunch.errors import LaunchError
from nblaunch.host import descriptors, signal_handlers

_Item = TypeVar("_Item")
_NO_WORKER = "no worker of the job is running"


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
        """Wake all waiting threads; later calls to :meth:`wait` return at once."""
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


class WakePipe:
    """A pipe that wakes a wait loop. Its descriptors stay open while any object refers to it.

    There is no ``close``: otherwise, a thread or signal handler in the middle of :meth:`wake` could write its byte into
    another file that has reused the descriptor's number. Drop the last reference instead.

    Raises:
        LaunchError: a pipe could not be created.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        try:
            self.reading, self._writing = os.pipe()
        except OSError as error:
            self._pid = -1
            raise LaunchError(
                f"a pipe could not be created: {error}. If file descriptors ran out (ulimit -n), close "
                "some files."
            ) from error
        os.set_blocking(self.reading, False)
        os.set_blocking(self._writing, False)
        descriptors.keep_from_children(self.reading, self._writing)

    def wake(self) -> None:
        """Wake the wait loop."""
        with suppress(BlockingIOError):  # the pipe is full, so the loop will wake anyway
            os.write(self._writing, b"!")

    def empty(self) -> None:
        """Consume all wake-ups so far."""
        with suppress(BlockingIOError):
            os.read(self.reading, 4096)

    def __del__(self) -> None:
        # A forked child closed the descriptors at once and may have reused their numbers.
        if self._pid == os.getpid():
            descriptors.close(self.reading, self._writing)


class Query(Future[str]):
    """A query to the supervisor, and its reply.

    Args:
        subject: ``"stacks"``: the position of every rank; ``"logs"``: confirmation that all output, events and board
            readings so far were reported.
    """

    def __init__(self, subject: str) -> None:
        super().__init__()
        self.subject = subject


class JobRequests:
    """Collects requests to a job and wakes the supervisor's wait loop. Safe in signal handlers and in any thread.

    Every query gets either a reply from the supervisor or the reason why there is none.

    Attributes:
        endings: number of requests, of any kind, to end the job.

    Raises:
        LaunchError: a pipe could not be created.
    """

    def __init__(self) -> None:
        self._pipe: WakePipe | None = WakePipe()
        self._interrupts: deque[None] = deque()
        self.endings = 0
        self.terminations = 0
        self.termination_grace_s = 0.0
        self._is_cancelled = False
        self._owner: weakref.ref[Any] | None = None
        self._lost_owners: list[Any] = []
        self.wants_stop = False
        self._signals: deque[int] = deque()
        self._new_queries: deque[Query] = deque()
        self._taken_queries: set[Query] = set()
        self._is_answering = False

    def fileno(self) -> int:
        """Return a descriptor for ``select`` that is readable after a request; -1 after the end of the job."""
        return self._pipe.reading if self._pipe is not None else -1

    @property
    def is_cancelled(self) -> bool:
        """Whether all workers must be killed."""
        return self._is_cancelled or bool(self._lost_owners)

    @property
    def interrupts(self) -> int:
        """Number of interrupts that were requested."""
        return len(self._interrupts)

    def interrupt(self) -> None:
        """Interrupt the workers, with a grace period; the second call kills them."""
        self._interrupts.append(None)
        self.endings += 1
        self._wake()

    def terminate(self, grace_s: float) -> None:
        """Ask the loops to end, and interrupt them after ``grace_s`` seconds; a second call interrupts them at once."""
        self.termination_grace_s = grace_s
        self.terminations += 1
        self.endings += 1
        if self.terminations > 1:
            self._interrupts.append(None)
        self._wake()

    def stop(self) -> None:
        """Ask the loops of all ranks to end at the same step."""
        self.wants_stop = True
        self.endings += 1
        self._wake()

    def cancel(self) -> None:
        """Kill the workers at once."""
        self._is_cancelled = True
        self.endings += 1
        self._wake()

    def pass_on(self, signum: int) -> None:
        """Send a signal to the ranks that handle it."""
        self._signals.append(signum)
        self._wake()

    def take_signals(self) -> list[int]:
        """Return the signals to pass on that have arrived since the last call."""
        return list(_popped(self._signals.popleft))

    def cancel_without(self, owner: object) -> None:
        """Cancel the job once nothing refers to ``owner``.

        Python ignores an exception that a signal handler raises in a finalizer, and skips the rest of the finalizer.
        No handler can interrupt this callback, which is one call to a C function.
        """
        self._owner = weakref.ref(owner, self._lost_owners.append)

    def ask_stacks(self) -> Future[str]:
        """Ask for the position of every rank; the future gets a reply within a second or two."""
        return self._ask(Query("stacks"))

    def ask_logs(self) -> Future[str]:
        """Ask to report all output, events and board readings so far; the future completes after that."""
        return self._ask(Query("logs"))

    def _ask(self, query: Query) -> Future[str]:
        self._new_queries.append(query)
        # Check this after the append: once queries are no longer answered, only those appended before that point are
        # rejected.
        if not self._is_answering:
            self._reject_queries()
        self._wake()
        return query

    def acknowledge(self) -> None:
        """Consume the pipe's wake-ups."""
        if self._pipe is not None:
            self._pipe.empty()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Let the caller answer queries while the block runs; queries left at its end are rejected."""
        self._is_answering = True
        try:
            yield
        finally:
            self._is_answering = False
            self._reject_queries()

    def take_queries(self) -> list[Query]:
        """Return the queries since the last call, each to be answered with :meth:`answer`."""
        queries = list(_popped(self._new_queries.popleft))
        self._taken_queries.update(queries)
        return queries

    def answer(self, query: Query, text: str) -> None:
        """Answer a query unless it was already cancelled or rejected."""
        self._taken_queries.discard(query)
        with suppress(InvalidStateError):
            query.set_result(text)

    def close(self) -> None:
        """Mark the job as ended: later requests are counted but have no effect."""
        self._pipe = None

    def _reject_queries(self) -> None:
        for pop in (self._new_queries.popleft, self._taken_queries.pop):
            for query in _popped(pop):
                self.answer(query, _NO_WORKER)

    def _wake(self) -> None:
        pipe = self._pipe  # a reference keeps the pipe open until the byte is written
        if pipe is not None:
            pipe.wake()


def _popped(pop: Callable[[], _Item]) -> Iterator[_Item]:
    """Remove and yield all items, even while other threads do the same."""
    while True:
        try:
            yield pop()
        except LookupError:
            return


@contextmanager
def interrupts_as_requests(request: Callable[[], None]) -> Iterator[None]:
    """While the block runs, let SIGINT call ``request()`` instead of raising an exception at a random line.

    This works only in the main thread; elsewhere nothing changes. The previous handler is always restored. A
    SIGINT that arrived earlier, while signal handlers were held back, counts as a request.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, lambda signum, frame: request())
    try:
        if signal_handlers.take(signal.SIGINT):
            request()
        yield
    finally:
        # getsignal() returns None for a handler that Python did not set, and signal() does not accept None.
        signal.signal(signal.SIGINT, before if before is not None else signal.default_int_handler)
