"""Workers forked from this process: they have the function, its closure and the model without any copying.

kernel ── pause OpenMP pools, freeze the collector's heap, hold back signals
       ├── fork ──> worker 0: worker/bootstrap.run, never returns
       ├── fork ──> worker 1
       └── undo the three
"""

from __future__ import annotations

import errno
import gc
import os
import random
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from nblaunch import backends
from nblaunch.backends.base import Backend
from nblaunch.engines.base import Engine, WorkerGroup
from nblaunch.engines.children import Children, kill_and_reap
from nblaunch.engines.openmp import pause_pools
from nblaunch.engines.saved_call import SavedCall
from nblaunch.errors import LaunchError
from nblaunch.wire.assignment import Assignment, Call
from nblaunch.wire.board import Board
from nblaunch.wire.originals import Originals
from nblaunch.worker import bootstrap, guard


class ForkEngine(Engine):
    """Fork from the calling thread: the main one, while no other code of the user can run."""

    name = "fork"

    def start(
        self, call: Call, assignments: Sequence[Assignment], board: Board, saved: SavedCall | None = None
    ) -> WorkerGroup:
        return Children(fork_workers(lambda: call, assignments, board))


def fork_workers(
    load_call: Callable[[], Call], assignments: Sequence[Assignment], board: Board
) -> dict[int, int]:
    """Fork one worker per assignment; returns rank -> process id. Only the parent returns."""
    pids: dict[int, int] = {}
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "buffer"):  # a kernel's stream has none, and waiting for its thread takes a while
            stream.flush()  # or every worker would carry a copy of what is buffered
    _prepare(backends.find(assignments[0].backend))
    is_paused = pause_pools()
    parent_pid = os.getpid()
    load_call = _with_random_state(load_call)
    with (
        _memory_shown(assignments) as originals,
        _frozen_heap(),
        guard.signals_held_back(),
        warnings.catch_warnings(),
    ):
        # Python warns about forking with threads; what a worker must not touch of theirs, worker/ takes care of.
        warnings.simplefilter("ignore", DeprecationWarning)
        for assignment in assignments:
            try:
                pid = os.fork()
            except OSError as error:
                kill_and_reap(pids.values())  # those that were started before this one was refused
                raise LaunchError(_refusal(error, len(pids), len(assignments))) from error
            if pid == 0:
                _be_worker(assignment, assignments, load_call, board, parent_pid, is_paused, originals)
            pids[assignment.rank] = pid
    return pids


def _prepare(backend: Backend) -> None:
    try:
        backend.prepare_parent()
    except RuntimeError as error:
        raise LaunchError(f"workers for {backend.name} can't be started: {error}") from error


def _be_worker(
    own: Assignment,
    assignments: Sequence[Assignment],
    load_call: Callable[[], Call],
    board: Board,
    parent_pid: int,
    is_paused: bool,
    originals: Originals | None,
) -> None:
    """In the child. Never returns, whatever happens."""
    try:
        for other in assignments:
            if other is not own:
                for fd in other.own_fds:
                    os.close(fd)
        own = replace(own, parent_pid=parent_pid, restricts_threads=not is_paused)
        bootstrap.run(own, load_call, board.slot(own.rank), originals)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _with_random_state(load_call: Callable[[], Call]) -> Callable[[], Call]:
    """Python seeds ``random`` anew in every child that it forks, unlike numpy and torch: undo that before the call."""
    state = random.getstate()

    def load() -> Call:
        random.setstate(state)
        return load_call()

    return load


@contextmanager
def _memory_shown(assignments: Sequence[Assignment]) -> Iterator[Originals | None]:
    """What workers need to find the weights that they have not changed, where weights are wanted."""
    originals = Originals.of_this_process() if assignments[0].sends_weights_of else None
    try:
        yield originals
    finally:
        if originals is not None:
            os.close(originals.fd)


_FROZEN_BY_PYTHON = 2000
"""Python 3.12 starts with some hundred frozen objects; a frozen heap with torch in it has 200,000."""


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """Keep the collector of the workers away from the objects they share with the kernel.

    A collection writes to the header of every object it looks at, which would copy the page it lies on.
    """
    was_frozen = gc.get_freeze_count() > _FROZEN_BY_PYTHON
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()


def _refusal(error: OSError, started: int, wanted: int) -> str:
    advice = {
        errno.EAGAIN: "a limit on processes is reached (ulimit -u, or the pids limit of the container): "
        "use fewer processes, or end others",
        errno.ENOMEM: "the system will not promise more memory: use fewer processes, or free some in the kernel",
    }.get(error.errno or 0, "use fewer processes")
    return (
        f"the system refused to start worker {started} of {wanted} (fork: {error.strerror}); the {started} workers "
        f"that had started were ended. {advice[0].upper()}{advice[1:]}."
    )
