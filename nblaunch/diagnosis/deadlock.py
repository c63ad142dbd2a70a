"""Finds, within seconds, ranks that wait forever for a thread that their process does not have.

A forked worker has none of the kernel's threads. If its code waits for a task in a pool that a cell started, or for a
thread that fills a queue, it waits forever. Threads of one worker can also wait for each other. The detector needs no
list of libraries: ``host/waits.py`` asks the system whether anything outside the process can end these waits.

    DeadlockDetector  processes -> observe() -> ranks that certainly, or probably, wait forever
    is_confirmed      a probable rank and its stack -> whether it waits forever
    explain, advice   what the ranks wait for, and what to do
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from nblaunch import formatting
from nblaunch.diagnosis.stacks import Position, frames_inside_user_code
from nblaunch.host.waits import Waits, endless_waits

_PERIOD_S = 0.4
CERTAIN_S = 1.0
"""How long every thread of a rank must have slept. Before that, threads of a pool may still be taking turns, or a
signal may be on its way.
"""

_LIKELY_S = 1.5
"""How long the main thread must have slept while other threads, such as gloo's, wait for clocks or sockets."""

_AWAITED = (
    ("/concurrent/futures/", "a task in a pool"),
    ("/multiprocessing/pool.py", "a task in a pool"),
    ("/multiprocess/pool.py", "a task in a pool"),
    ("/asyncio/", "a task in an event loop"),
    ("/queue.py", "a queue"),
    ("/threading.py", "another thread"),
)
"""Files of the standard library, and what a call into each of them waits for."""

_PACKAGE = re.compile(r"/(?:site|dist)-packages/([^/.]+)")


class DeadlockDetector:
    """Reports ranks that wait forever, and reports each wait only once.

    A check of a running rank reads only one small file.
    """

    def __init__(self) -> None:
        self._next_s = 0.0
        self._seen: dict[int, tuple[float, Waits]] = {}
        self._reported: dict[int, str] = {}

    def observe(self, now_s: float, pids: Mapping[int, int]) -> dict[int, bool]:
        """Check the running ranks, at most twice a second.

        Args:
            now_s: ``time.monotonic()``.
            pids: rank -> process.

        Returns:
            Rank -> whether the rank certainly waits forever. If the value is False, :func:`is_confirmed` decides from
            the rank's stack. Each wait is reported once.
        """
        if now_s < self._next_s:
            return {}
        self._next_s = now_s + _PERIOD_S
        judgements = {rank: self._judge(now_s, rank, endless_waits(pid)) for rank, pid in pids.items()}
        return {rank: is_certain for rank, is_certain in judgements.items() if is_certain is not None}

    def _judge(self, now_s: float, rank: int, waits: Waits | None) -> bool | None:
        if waits is None:
            self._seen.pop(rank, None)
            return None
        since_s, before = self._seen.get(rank, (now_s, None))
        if before is None or waits.main != before.main or (waits.are_endless and waits != before):
            self._seen[rank] = (now_s, waits)
            return None
        _, address, _ = waits.main
        needed_s = CERTAIN_S if waits.are_endless else _LIKELY_S
        if now_s - since_s < needed_s or self._reported.get(rank) == address:
            return None
        self._reported[rank] = address
        return waits.are_endless


def is_confirmed(position: Position) -> bool:
    """Return whether a rank waits for a Python thread but has no other Python thread; it may have native threads."""
    inner = frames_inside_user_code(position)
    is_python_wait = bool(inner) and any(part in inner[0].filename for part, _ in _AWAITED)
    return is_python_wait and position.num_threads == 1


def explain(positions: Mapping[int, Position]) -> list[str]:
    """Return a line for each kind of wait.

    Args:
        positions: rank -> position, for ranks that wait forever.
    """
    awaited = {rank: _awaited(position) for rank, position in positions.items()}
    return [
        f"{formatting.ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'} for {what}, and the worker has no thread "
        "that could end the wait."
        for what, ranks in formatting.ranks_by_text(awaited).items()
    ]


def advice(start_method: str) -> str:
    """Return the advice for ranks that wait forever; it depends on the start method of the workers."""
    return _FORKED if start_method == "fork" else _FRESH


_FORKED = (
    "A forked worker has none of the kernel's threads, so a lock that one of them held stays locked. Create the "
    "lock, the pool, the thread that fills the queue, or the library's session inside the function, or launch with "
    "start_method='forkserver'."
)
_FRESH = (
    "Every thread of the worker waits for another thread. Look for a lock that the function acquires twice, or a "
    "queue that nothing fills."
)


def _awaited(position: Position) -> str:
    """Return what a rank waits for, judging by the outermost library function that the user's code has called."""
    for frame in reversed(frames_inside_user_code(position)):
        for part, what in _AWAITED:
            if part in frame.filename:
                return what
        package = _PACKAGE.search(frame.filename)
        if package is not None:
            return f"a thread of {package[1]}"
    return "another thread"
