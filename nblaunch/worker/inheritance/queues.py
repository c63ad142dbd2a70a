"""``multiprocessing`` queues that a cell created and that the function puts values into.

Such a queue is a pipe. A thread in the writing process writes each value, and Python joins this thread when the process
exits. A rank therefore can't end before another process has read a value that is larger than the pipe, but the kernel
reads nothing while it is waiting for the ranks. For this reason, a rank reports the pipes that it is waiting for. Once
all ranks are waiting, the launcher buffers what they write and passes it to the kernel's queues
(:class:`UnreadQueues`).

A tensor is sent as a handle to memory, which the reader requests from the sending process. A rank therefore also waits
until its tensors have been read.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import select
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

from nblaunch.events import Event, Note, PutUnread
from nblaunch.host import descriptors
from nblaunch.wire.board import Board, Slot

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
        slot: this rank's slot.
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
    """Return the handles to shared memory that no process has requested yet."""
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


# --- the launcher: saves what no process has read ---------------------------------------------------------------------

#     rank ── PutUnread ──> UnreadQueues: once all running ranks are waiting for readers
#                             └── thread: reads the pipes, so that the ranks can end
#                                         writes the values that fit back into the pipes
#                                         writes the rest while the kernel reads
#
# The thread holds the queue's read lock while it reads, so that no reader gets values out of order. A rank that is
# still running its function may be a reader; while there is a reader, nblaunch does not touch the queues.

_POLL_MS = 20
_SETTLED_S = 0.2
"""How long the pipes must stay empty before the ranks may end; tensors that no process has read by then are lost."""
_LOCK_S = 2.0
"""How long to wait for a queue's write lock. A rank that was killed while writing holds the lock forever."""
_REFILL_S = 10.0

_INT, _LONG = struct.Struct("!i"), struct.Struct("!Q")  # source: Connection._send_bytes in multiprocessing

_UNKNOWN = (
    "the function has put values into a queue that this process does not have. No process reads them, so the rank "
    "can't end: return the values instead"
)
_CUT = "a value that a rank put into one of the kernel's queues is lost: the rank was killed while writing it"


class UnreadQueues:
    """The kernel's queues that contain values left by the ranks of an attempt.

    Args:
        board: board of the attempt.
        emit: receives notes.
    """

    def __init__(self, board: Board, emit: Callable[[Event], None]) -> None:
        self._board = board
        self._emit = emit
        self._waiting: dict[int, PutUnread] = {}
        self._thread: _KeepingThread | None = None

    def receive(self, event: Event) -> None:
        """Handle a rank's event; a ``PutUnread`` means that the rank is waiting for readers."""
        if isinstance(event, PutUnread):
            self._waiting[event.rank] = event

    def collect(self, alive: Collection[int]) -> None:
        """Start saving the ranks' values if every running rank is waiting for readers. Never blocks."""
        if self._thread is not None or not alive or not self._waiting.keys() >= set(alive):
            return
        pipes = {pipe for event in self._waiting.values() for pipe in event.pipes}
        queues = {pipe: queue for pipe, queue in queues_of_this_process() if pipe in pipes}
        if pipes - queues.keys():
            self._emit(Note.of_job(_UNKNOWN, "warning"))
        has_tensors = any(event.has_tensors for event in self._waiting.values())
        self._thread = _KeepingThread(
            [_Kept(queue, has_tensors) for queue in queues.values()], self._release_ranks
        )
        self._thread.start()

    def end(self) -> None:
        """When all ranks have ended, put back as many saved values as the queues can hold."""
        if self._thread is None:
            return
        num_cut = self._thread.put_back()
        self._thread = None
        if num_cut:
            self._emit(Note.of_job(_CUT, "warning"))

    def _release_ranks(self) -> None:
        for rank in self._waiting:
            self._board.slot(rank).handing_over = 0


class _KeepingThread(threading.Thread):
    """Reads queues until :meth:`put_back` is called, then writes the values back.

    Args:
        queues: the queues.
        release_ranks: called while the queues are empty, so that no tensor is left in them.
    """

    def __init__(self, queues: Sequence[_Kept], release_ranks: Callable[[], None]) -> None:
        super().__init__(name="nblaunch-queues", daemon=True)
        self._queues = queues
        self._release_ranks = release_ranks
        self._ranks_have_ended = threading.Event()
        self._is_put_back = threading.Event()

    def put_back(self) -> int:
        """Write back as many values as fit; the thread writes the rest.

        Returns:
            The number of values that were lost because their rank was killed.
        """
        queues = self._queues
        self._ranks_have_ended.set()
        self._is_put_back.wait(_REFILL_S)
        return sum(queue.is_cut for queue in queues)

    def run(self) -> None:
        self._read()
        rest = [writer for queue in self._queues if (writer := queue.put_back()) is not None]
        self._is_put_back.set()
        for write in rest[1:]:
            threading.Thread(target=write, name=self.name, daemon=True).start()
        self._queues = ()
        if rest:
            rest[0]()

    def _read(self) -> None:
        last_s = time.monotonic()
        while True:
            # Check this first, so that all of the ranks' output is read afterwards.
            has_ended = self._ranks_have_ended.is_set()
            now = time.monotonic()
            num_read = sum(queue.read() for queue in self._queues)
            if num_read:
                last_s = now
            elif has_ended:
                return
            elif now - last_s > _SETTLED_S:
                self._release_ranks()
            _wait_for_input([queue.reader for queue in self._queues])


class _Kept:
    """The saved values of one queue.

    Args:
        queue: one of the kernel's queues.
        has_tensors: whether values may refer to a rank's memory, which must be taken over while the rank is alive.
    """

    def __init__(self, queue: Any, has_tensors: bool) -> None:
        self._read_lock, self._write_lock = queue._rlock, queue._wlock
        self._has_tensors = has_tensors
        self._is_locked = False
        # Duplicate the descriptors, because the user may drop the queue. If a pipe has no reader, the thread that
        # writes to it ends.
        self.reader, self._writer = os.dup(queue._reader.fileno()), os.dup(queue._writer.fileno())
        descriptors.keep_from_children(self.reader, self._writer)
        self._messages: list[bytes | bytearray] = []
        self._begin_message()

    @property
    def is_cut(self) -> bool:
        """Whether the last value is incomplete."""
        return bool(self._message)

    def _begin_message(self) -> None:
        self._message, self._num_missing = bytearray(), _INT.size

    def read(self) -> bool:
        """Read the available bytes; return whether there were any."""
        if not self._is_locked:
            self._is_locked = self._read_lock.acquire(False)
        has_read = False
        while self._is_locked and _wait_for_input([self.reader], 0):
            part = os.read(self.reader, self._num_missing)
            self._message += part
            self._num_missing -= len(part)
            has_read = True
            if not self._num_missing:
                self._end_part()
        return has_read

    def _end_part(self) -> None:
        """Determine the size of the next part after a complete part of a message."""
        size = len(self._message)
        if size == _INT.size:
            number = _INT.unpack(self._message)[0]
            self._num_missing = _LONG.size if number == -1 else number
        elif size == _INT.size + _LONG.size and _INT.unpack_from(self._message)[0] == -1:
            self._num_missing = _LONG.unpack_from(self._message, _INT.size)[0]
        if not self._num_missing:
            self._messages.append(_taken_over(self._message) if self._has_tensors else self._message)
            self._begin_message()

    def put_back(self) -> Callable[[], None] | None:
        """Write as many bytes as the pipe takes now; return a function that writes the rest."""
        descriptors.close(self.reader)
        if not self._messages:
            descriptors.close(self._writer)
            self._end_reading()
            return None
        has_lock = self._write_lock.acquire(timeout=_LOCK_S)
        data = memoryview(b"".join(self._messages))
        self._messages = []
        num_first = fcntl.fcntl(self._writer, fcntl.F_GETPIPE_SZ) if hasattr(fcntl, "F_GETPIPE_SZ") else 0
        num_first = min(num_first or select.PIPE_BUF, len(data))
        _write_bytes(self._writer, data[:num_first])

        def write_rest() -> None:
            try:
                _write_bytes(self._writer, data[num_first:])
            except BrokenPipeError:  # the user dropped the queue
                pass
            finally:
                descriptors.close(self._writer)
                if has_lock:
                    self._write_lock.release()

        self._end_reading()
        return write_rest

    def _end_reading(self) -> None:
        if self._is_locked:
            self._is_locked = False
            self._read_lock.release()


def _write_bytes(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _wait_for_input(fds: Sequence[int], timeout_ms: int = _POLL_MS) -> bool:
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    return bool(poller.poll(timeout_ms))


def _taken_over(message: bytearray) -> bytes | bytearray:
    """Return the message with the sending rank's memory replaced by memory of this process."""
    body = message[_INT.size + (_LONG.size if _INT.unpack_from(message)[0] == -1 else 0) :]
    try:
        data = bytes(ForkingPickler.dumps(ForkingPickler.loads(body)))
    except Exception:  # the user's code raised an error; the kernel gets the error when it reads the message
        return message
    if len(data) > 0x7FFFFFFF:
        return _INT.pack(-1) + _LONG.pack(len(data)) + data
    return _INT.pack(len(data)) + data
