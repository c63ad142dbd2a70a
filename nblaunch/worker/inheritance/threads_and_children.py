"""The kernel's threads, which do not run in a forked worker, and its child processes, which a worker can't wait for.

A ``QueueHandler`` passes log records to the thread of a ``QueueListener``; a worker restarts that thread at its first
record. ``join()`` of any other thread returns at once in a worker, because Python marks the threads that a fork
leaves behind as ended. A note says so.

Only the parent of a process can wait for it. If a wait fails, ``subprocess`` assumes that the process ended with
status 0. In a forked worker, a server that the kernel started would then always seem to have ended, and ``kill()``
would do nothing. A worker therefore asks the system for the state of the programs that the kernel started.

The launcher uses other ways to detect workers that wait for a thread of the kernel (``diagnosis/long_waits.py``).
"""

from __future__ import annotations

import atexit
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from nblaunch import context, packages
from nblaunch.events import Note
from nblaunch.host import exhaustion
from nblaunch.user_code import is_user_file

_POLL_S = 0.05
_STATE, _EXIT_STATUS = 0, 49
"""Indices of fields after the command's name. Source: proc_pid_stat(5), state and exit_code."""

_ENDED = ("Z", "X")

_threads: list[threading.Thread] = []
"""The threads that ran in the kernel at the fork, as seen in a forked worker."""

_listeners: list[Any] = []
"""Objects of the class ``QueueListener`` whose methods these threads run."""

_reported: set[int] = set()
"""IDs of threads whose joins were reported."""

_has_children = False
"""Whether the process that forked this worker had children, which may be programs."""

_are_children_watched = False


def remember() -> None:
    """Record the threads of this process, which is about to fork, and whether it has children."""
    _threads[:] = threading.enumerate()
    _threads.remove(threading.current_thread())
    handlers: Any = sys.modules.get("logging.handlers")
    if handlers is not None:
        runners = (getattr(getattr(thread, "_target", None), "__self__", None) for thread in _threads)
        _listeners[:] = [runner for runner in runners if isinstance(runner, handlers.QueueListener)]
    global _has_children
    _has_children = True
    if sys.platform != "darwin":  # this system has no waitid()
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            _has_children = False


# --- threads ---------------------------------------------------------------------------------------------------------


def watch_threads() -> None:
    """Restart log listeners in this worker when needed, and report joins of threads that do not run here."""
    if _listeners:
        handlers: Any = sys.modules["logging.handlers"]
        packages.before_first_use(
            handlers.QueueHandler,
            ["handle"],
            lambda handler: _restart_listener(handler.queue),
            includes_new=True,
        )
    if _threads:
        _watch_joins()


def _restart_listener(records: Any) -> None:
    """Start a thread for the listener that reads one of the kernel's queues, if there is such a listener.

    Records in queues that processes share still reach the kernel's listener.
    """
    if not isinstance(records, (queue.Queue, queue.SimpleQueue)):
        return
    for listener in _listeners:
        if listener.queue is records and listener._thread in _threads:
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

    @packages.replaces(threading.Thread, "join")
    def join_here(self: threading.Thread, timeout: float | None = None) -> None:
        if id(self) not in _reported and any(self is thread for thread in _threads):
            caller = sys._getframe(1)
            if is_user_file(caller.f_code.co_filename):
                _reported.add(id(self))
                _report_join(self.name, caller.f_lineno)
        join(self, timeout)


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


# --- child processes -------------------------------------------------------------------------------------------------


def watch_children(*, is_forked_here: bool = False) -> None:
    """Make ``subprocess`` in this process report the true state of the programs that the kernel started.

    Args:
        is_forked_here: whether this process was forked from a worker, which may have started programs itself.
    """
    global _are_children_watched
    if _are_children_watched or not (_has_children or is_forked_here):
        return
    _are_children_watched = True
    cls: Any = subprocess.Popen
    poll, try_wait = cls._internal_poll, cls._try_wait

    @packages.replaces(cls, "_internal_poll")
    def poll_here(self: Any, *args: Any, **kwargs: Any) -> int | None:
        if self.returncode is not None or packages.is_own(self):
            result: int | None = poll(self, *args, **kwargs)
            return result
        status = _status(self.pid)
        if status is not None:
            self._handle_exitstatus(status)
        return None if status is None else self.returncode

    @packages.replaces(cls, "_try_wait")
    def try_wait_here(self: Any, wait_flags: int) -> tuple[int, int]:
        if packages.is_own(self):
            result: tuple[int, int] = try_wait(self, wait_flags)
            return result
        while (status := _status(self.pid)) is None:
            if wait_flags & os.WNOHANG:
                return 0, 0
            time.sleep(_POLL_S)
        return self.pid, status

    packages.call_before(cls, "__init__", packages.mark_as_own)


def _status(pid: int) -> int | None:
    """Return the wait status of a process that has ended (0 if only its parent knows it); None while it runs."""
    try:
        os.kill(pid, 0)
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except PermissionError:  # the process belongs to another user
        return None
    except ProcessLookupError:
        return 0
    except OSError as error:
        # The process has just ended, unless its file can't be opened or there is no /proc.
        is_unknown = exhaustion.is_exhausted(error) or not os.path.isdir("/proc/self")
        return None if is_unknown else 0
    return int(fields[_EXIT_STATUS]) if fields[_STATE] in _ENDED else None
