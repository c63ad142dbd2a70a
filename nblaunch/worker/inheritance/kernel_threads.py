"""The kernel's threads, which do not run in a forked worker, and the objects that depend on them.

A ``QueueHandler`` passes log records to the thread of a ``QueueListener``; a worker restarts that thread at its first
record. ``join()`` of any other thread returns at once in a worker, because Python marks the threads that a fork
leaves behind as ended. A note says so.

The launcher uses other ways to detect workers that wait for such a thread (``diagnosis/deadlock.py``).
"""

from __future__ import annotations

import atexit
import queue
import sys
import threading
from typing import Any

from nblaunch import context, packages
from nblaunch.events import Note
from nblaunch.user_code import is_user_file

of_kernel: list[threading.Thread] = []
"""The threads that ran in the kernel at the fork, as seen in a forked worker."""

_listeners: list[Any] = []
"""Objects of the class ``QueueListener`` whose methods these threads run."""

_reported: set[int] = set()


def remember() -> None:
    """Record the threads of this process, which is about to fork."""
    of_kernel[:] = threading.enumerate()
    of_kernel.remove(threading.current_thread())
    handlers: Any = sys.modules.get("logging.handlers")
    if handlers is not None:
        runners = (getattr(getattr(thread, "_target", None), "__self__", None) for thread in of_kernel)
        _listeners[:] = [runner for runner in runners if isinstance(runner, handlers.QueueListener)]


def watch() -> None:
    """Restart log listeners in this worker when needed, and report joins of threads that do not run here."""
    if _listeners:
        handlers: Any = sys.modules["logging.handlers"]
        packages.call_before(handlers.QueueHandler, "handle", _restart_listener_once)
    if of_kernel:
        _watch_joins()


def _restart_listener_once(handler: Any) -> None:
    if not packages.is_own(handler):
        packages.mark_as_own(handler)
        _restart_listener(handler.queue)


def _restart_listener(records: Any) -> None:
    """Start a thread for the listener that reads one of the kernel's queues, if there is such a listener.

    Records in queues that processes share still reach the kernel's listener.
    """
    if not isinstance(records, (queue.Queue, queue.SimpleQueue)):
        return
    for listener in _listeners:
        if listener.queue is records and listener._thread in of_kernel:
            _empty(records)
            listener._thread = None
            listener.start()
            atexit.register(_stop, listener)
            return


def _empty(records: Any) -> None:
    """Drop the records, which the kernel's own thread handles, and the queue's locks, which that thread may hold."""
    if isinstance(records, queue.Queue):
        queue.Queue.__init__(records, records.maxsize)
        return
    while not records.empty():
        records.get_nowait()


def _stop(listener: Any) -> None:
    if listener._thread is not None:  # the function may have stopped it
        listener.stop()


def _watch_joins() -> None:
    join = threading.Thread.join

    @packages.replacement_of(join)
    def join_here(self: threading.Thread, timeout: float | None = None) -> None:
        if id(self) not in _reported and any(self is thread for thread in of_kernel):
            caller = sys._getframe(1)
            if is_user_file(caller.f_code.co_filename):
                _reported.add(id(self))
                _report_join(self.name, caller.f_lineno)
        join(self, timeout)

    threading.Thread.join = join_here  # type: ignore[method-assign]


def _report_join(name: str, line: int) -> None:
    here = context.current()
    here.emit(
        Note(
            rank=here.topology.rank,
            kind="warning",
            text=f"line {line} joins the thread {name!r} of the kernel, which does not run in a worker, so join() "
            "returns at once, before the thread has done its work. Start the thread inside the function",
        )
    )
