"""Quickly finds ranks that are waiting for a thread that their process does not have, or for a reader of a queue.

A forked worker has none of the kernel's threads. If its code waits for a task in a pool that a cell started, or for a
thread that fills a queue, it waits forever. Threads of one worker can also wait for each other. The detector needs no
list of libraries: ``host/waits.py`` asks the system whether anything outside the process can end these waits.

A ``multiprocessing.SimpleQueue`` or ``Pipe`` holds 64 kB; a bounded queue holds as many values as its size. When the
queue or pipe is full, ``put()`` and ``send()`` wait for a reader. The kernel does not read while it waits for a launch,
but another rank, or another process or thread of the kernel, might. The wait may therefore end, so nblaunch only shows
a note with the line.

    WaitDetector      processes -> observe() -> the kinds of new waits
    is_confirmed      a kind and the rank's stack -> whether the rank is waiting in this way
    explain, advice   what the ranks are waiting for, and what to do
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from nblaunch import formatting
from nblaunch.diagnosis.stacks import Position, frames_inside_user_code
from nblaunch.host.waits import Waits, endless_waits, has_awaited_object, wait_for_others
from nblaunch.worker.inheritance import threads

_PERIOD_S = 0.4


class WaitKind(enum.Enum):
    """What a rank waits for; the value is the number of seconds after which the wait counts."""

    THREAD = 1.0
    """A thread of its own process, whose threads are all sleeping. Until the wait counts, threads in a pool may still
    be taking turns, or a signal may be on its way.
    """
    THREAD_PERHAPS = 1.5
    """The same, but other threads, such as gloo's, are waiting for clocks or sockets."""
    READER = 2.0
    """A process that reads from a pipe, or releases a semaphore, that the rank shares with the kernel."""


_AWAITED = (
    ("/concurrent/futures/", "a task in a pool"),
    ("/multiprocessing/pool.py", "a task in a pool"),
    ("/multiprocess/pool.py", "a task in a pool"),
    ("/asyncio/", "a task in an event loop"),
    ("/queue.py", "a queue"),
    ("/threading.py", "another thread"),
)
"""Files of the standard library, and what a call into each of them waits for."""

_PUTTING = (
    ("process/queues.py", {"put", "join"}),
    ("processing/queues.py", {"put", "join"}),
    ("process/connection.py", {"_send"}),
    ("processing/connection.py", {"_send"}),
)
"""Source files of ``multiprocessing`` and ``multiprocess``, and functions that wait until another process reads."""

_PACKAGE = re.compile(r"/(?:site|dist)-packages/([^/.]+)")


class WaitDetector:
    """Finds ranks that have been waiting for a long time, and returns each wait only once.

    A check of a running rank reads only one small file.
    """

    def __init__(self) -> None:
        self._next_s = 0.0
        self._seen: dict[int, tuple[float, Waits]] = {}
        self._reported: dict[int, str] = {}

    def observe(self, now_s: float, pids: Mapping[int, int]) -> dict[int, WaitKind]:
        """Check the running ranks, at most twice a second; return the kinds of new waits, by rank.

        Args:
            now_s: ``time.monotonic()``.
            pids: rank -> process.
        """
        if now_s < self._next_s:
            return {}
        self._next_s = now_s + _PERIOD_S
        kinds = {rank: self._new_wait(now_s, rank, pid) for rank, pid in pids.items()}
        return {rank: kind for rank, kind in kinds.items() if kind is not None}

    def _new_wait(self, now_s: float, rank: int, pid: int) -> WaitKind | None:
        kind, waits = _wait_of(pid)
        if waits is None:
            self._seen.pop(rank, None)
            return None
        since_s, before = self._seen.get(rank, (now_s, None))
        if before is None or waits.main != before.main or (waits.are_endless and waits != before):
            self._seen[rank] = (now_s, waits)
            return None
        _, address, _ = waits.main  # asking a rank for its stack increments the number of sleeps
        if now_s - since_s < kind.value or self._reported.get(rank) == address:
            return None
        self._reported[rank] = address
        return None if kind is WaitKind.READER and not has_awaited_object(pid) else kind


def _wait_of(pid: int) -> tuple[WaitKind, Waits | None]:
    waits = endless_waits(pid)
    if waits is not None:
        return WaitKind.THREAD if waits.are_endless else WaitKind.THREAD_PERHAPS, waits
    main = wait_for_others(pid)
    return WaitKind.READER, None if main is None else Waits(main, None)


def is_confirmed(kind: WaitKind, position: Position) -> bool:
    """Return whether a rank's stack shows this kind of wait.

    A rank in a collective is waiting for other ranks, whatever its threads are doing. If a rank is only perhaps waiting
    for a thread, its stack must show a wait for a Python thread, and it must have no other Python thread; native
    threads are allowed. A rank that is waiting for a reader must be in the ``put()``, ``send()`` or ``join()`` method
    of a queue or pipe.
    """
    inner = frames_inside_user_code(position)
    if kind is WaitKind.READER:
        return any(
            frame.filename.endswith(file) and frame.name in names
            for frame in inner
            for file, names in _PUTTING
        )
    if not position.stack or position.waits_for_ranks:
        return False
    is_python_wait = bool(inner) and any(part in inner[0].filename for part, _ in _AWAITED)
    return kind is WaitKind.THREAD or (is_python_wait and position.num_threads == 1)


def explain(positions: Mapping[int, Position]) -> list[str]:
    """Return a line for each kind of wait for a thread.

    Args:
        positions: rank -> position, for ranks that will wait forever.
    """
    awaited = {rank: _awaited(position) for rank, position in positions.items()}
    return [
        f"{formatting.ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for {what}, and the worker has no thread "
        "that could end the wait."
        for what, ranks in formatting.ranks_by_text(awaited).items()
    ]


def explain_threads_of_libraries(positions: Iterable[Position]) -> list[str]:
    """Return a line for each library in which workers hang because the fork did not copy its threads.

    Args:
        positions: positions of ranks that were forked from this process.
    """
    files = {frame.filename for position in positions for frame in position.stack}
    return [
        f"{library.name} has threads in the kernel, which a fork does not copy, so a worker that uses it "
        "hangs: launch with start_method='forkserver'"
        for library in threads.LIBRARIES
        if any(library.name in Path(file).parts for file in files) and library.is_running()
    ]


def advice(start_method: str) -> str:
    """Return the advice for ranks that will wait forever; it depends on the workers' start method."""
    return _FORKED if start_method == "fork" else _FRESH


def explain_full_queues(ranks: Iterable[int]) -> str:
    """Return a message that names the ranks that are waiting for a reader and says what to do."""
    return _FULL.format(formatting.ranks(ranks))


_FORKED = (
    "A forked worker has none of the kernel's threads, so a lock that one of them held stays locked. Create the "
    "lock, the pool, the thread that fills the queue, or the library's session inside the function, or launch with "
    "start_method='forkserver'."
)
_FRESH = (
    "Every thread of the worker is waiting for another thread. Look for a lock that the function acquires twice, or a "
    "queue that nothing fills."
)
_FULL = (
    "{} can't put a value into a queue or pipe that a cell created: it is full, and no process is reading from it. "
    "The kernel does not read while it waits for the launch. Return the value instead, or put it into a "
    "multiprocessing.Queue() without a size, which the kernel can read after the launch."
)


def _awaited(position: Position) -> str:
    """Return what a rank is waiting for, judging by the outermost library function that the user's code has called."""
    for frame in reversed(frames_inside_user_code(position)):
        for part, what in _AWAITED:
            if part in frame.filename:
                return what
        package = _PACKAGE.search(frame.filename)
        if package is not None:
            return f"a thread of {package[1]}"
    return "another thread"
