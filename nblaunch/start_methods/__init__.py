"""Start methods: ``fork.py``, ``forkserver.py`` and ``spawn.py`` each have a ``start``, which :data:`STARTERS` lists.

The argument ``engine`` of ``notebook_launcher`` chooses between worker processes (``"local"``, or ``"elastic"`` with
other machines) and ``"inline"``, which starts no process. ``nblaunch.launcher.plan`` chooses the start method.

fork.py           forks this process
forkserver.py     forks a clean interpreter; also the code that runs in that interpreter
spawn.py          starts fresh interpreters, also for other modules; workers that are such interpreters
inline.py         runs the function in this process

Shared code:

worker_group.py   WorkerGroup, the interface for watching workers; waits for, signals and reaps children; exit statuses
saved_call.py     snapshot of a call for fresh interpreters
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nblaunch.start_methods import fork, forkserver, spawn
from nblaunch.start_methods.saved_call import SavedCall
from nblaunch.start_methods.worker_group import WorkerGroup
from nblaunch.wire.assignment import Assignment, FunctionCall
from nblaunch.wire.board import Board

Starter = Callable[[FunctionCall, Sequence[Assignment], Board, SavedCall | None], WorkerGroup]
"""Starts one worker per assignment. It is independent of events, logs and results.

Args:
    call: the function and its arguments.
    assignments: one per worker.
    board: progress board of the workers.
    saved: an earlier snapshot of the call, which fresh processes load instead of ``call``; None = save the call now.

Raises:
    PayloadError: the call can't be sent to workers; the message names the variable.
    LaunchError: the system could not start a process; those already started have been killed.
"""

STARTERS: Mapping[str, Starter] = {"fork": fork.start, "forkserver": forkserver.start, "spawn": spawn.start}
