"""Queues of ``multiprocessing`` that a cell has made, into which the function puts values.

Such a queue is a pipe. A thread of the process that puts a value writes it, and Python joins this thread when the
process ends: a rank does not end before another process has read a value that is larger than the pipe. The kernel
reads nothing while it waits for the ranks. So a rank reports which pipes it waits for. Once all ranks wait, the
launcher keeps what they write, and hands it to the kernel's queues (``launcher/unread_queues.py``).

A tensor travels as a handle of memory, for which the reader asks the process that has put it. So a rank also waits
until its tensors are taken.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from nblaunch.wire.board import Slot

_PACKAGES = ("multiprocessing", "multiprocess")
_WRITES_S = 0.1
"""How long a thread may need to write what fits into its pipe, before the rank reports that it waits."""
_POLL_S = 0.01

_LOST = (
    "tensors that the function has put into a queue of the kernel are lost, because no process has taken them before "
    "the rank ended: return them instead, or put `tensor.numpy()`"
)


def queues_of_this_process() -> Iterator[tuple[int, Any]]:
    """Yield the queues of this process that write by a thread, each after the inode of its pipe."""
    for package in _PACKAGES:
        kind = getattr(sys.modules.get(f"{package}.queues"), "Queue", None)
        if kind is None:
            continue
        registry: Any = sys.modules[f"{package}.util"]._afterfork_registry
        for queue in list(registry.values()):
            if isinstance(queue, kind) and (pipe := _pipe(queue)) is not None:
                yield pipe, queue


def hand_over(
    slot: Slot, report: Callable[[tuple[int, ...], bool], None], warn: Callable[[str], None]
) -> None:
    """Wait until other processes have what this rank has put into queues that it inherits.

    Args:
        slot: of this rank.
        report: called if that takes time, with the inodes of the queues' pipes, and whether tensors are in them.
        warn: takes a sentence for the user.
    """
    used = {pipe: queue for pipe, queue in queues_of_this_process() if _has_put(queue)}
    if not used and not _handles():
        return
    for queue in used.values():
        queue.close()  # its thread ends when it has written all
    _end_children()
    until_s = time.monotonic() + _WRITES_S
    for queue in used.values():
        queue._thread.join(max(0.0, until_s - time.monotonic()))
    has_tensors = bool(_handles())
    if not has_tensors and not any(queue._thread.is_alive() for queue in used.values()):
        return
    report(tuple(used), has_tensors)
    for queue in used.values():
        queue._thread.join()
    slot.handing_over = 1
    while _handles() and slot.handing_over:
        time.sleep(_POLL_S)
    if _handles():
        warn(_LOST)


def _pipe(queue: Any) -> int | None:
    """Return the inode of a queue's pipe; None if this process has closed it."""
    try:
        return os.fstat(queue._writer.fileno()).st_ino
    except (OSError, ValueError):
        return None


def _has_put(queue: Any) -> bool:
    """Return whether this process has put values into a queue of its parent, and means to wait for them."""
    return queue._opid != os.getpid() and queue._thread is not None and not queue._joincancelled


def _handles() -> Any:
    """Return the handles of shared memory that no process has asked this one for yet."""
    sharer: Any = sys.modules.get("multiprocessing.resource_sharer")
    return {} if sharer is None else sharer._resource_sharer._cache


def _end_children() -> None:
    """End processes of the function as Python does at its exit, since they may read the queues."""
    children = multiprocessing.active_children()
    for child in children:
        if child.daemon:
            child.terminate()
    for child in children:
        child.join()
