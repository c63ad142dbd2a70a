"""``multiprocessing`` queues that a cell created and that the function puts values into.

Such a queue is a pipe. A thread of the writing process writes each value, and Python joins this thread when the
process ends. A rank therefore can't end before another process has read a value that is larger than the pipe, but the
kernel reads nothing while it waits for the ranks. For this reason a rank reports the pipes that it waits for. Once
all ranks wait, the launcher buffers what they write and passes it to the kernel's queues
(``launcher/unread_queues.py``).

A tensor is sent as a handle to memory, which the reader requests from the sending process. A rank therefore also waits
until its tensors have been read.
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
"""How long a thread may take to fill its pipe before the rank reports that it is waiting."""
_POLL_S = 0.01

_LOST = (
    "tensors that the function put into one of the kernel's queues are lost, because no process had read them "
    "before the rank ended. Return them instead, or put `tensor.numpy()` into the queue"
)


def queues_of_this_process() -> Iterator[tuple[int, Any]]:
    """Yield (inode of the pipe, queue) for each queue of this process that writes in a thread."""
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
    """Wait until other processes have read the values that this rank put into inherited queues.

    Args:
        slot: slot of this rank.
        report: called if the wait takes a long time, with the inodes of the queues' pipes and whether they hold
            tensors.
        warn: receives a sentence for the user.
    """
    used = {pipe: queue for pipe, queue in queues_of_this_process() if _has_put(queue)}
    if not used and not _handles():
        return
    for queue in used.values():
        queue.close()  # its thread ends once it has written everything
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
    """Return whether this process has put values into a queue of its parent and would wait for them at exit."""
    return queue._opid != os.getpid() and queue._thread is not None and not queue._joincancelled


def _handles() -> Any:
    """Return the handles of shared memory that no process has requested yet."""
    sharer: Any = sys.modules.get("multiprocessing.resource_sharer")
    return {} if sharer is None else sharer._resource_sharer._cache


def _end_children() -> None:
    """End the function's processes as Python does at exit, because they may read the queues."""
    children = multiprocessing.active_children()
    for child in children:
        if child.daemon:
            child.terminate()
    for child in children:
        child.join()
