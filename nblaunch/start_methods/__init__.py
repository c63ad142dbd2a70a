"""How workers start; ``fork.py``, ``forkserver.py``, ``spawn.py`` have a ``start`` that :data:`STARTERS` lists.

The argument ``engine`` of ``notebook_launcher`` chooses between worker processes (``"local"``, or ``"elastic"`` with
other machines) and ``"inline"``, which starts none. ``nblaunch.launcher.plan`` chooses the start method.

fork.py           forks of this process
forkserver.py     forks of a clean interpreter, and the code that this interpreter runs
spawn.py          fresh interpreters
inline.py         the function runs in this process

What they share:

worker_group.py   WorkerGroup, by which workers are watched; child processes: wait, signal, reap
saved_call.py     the call as it was at one moment, for fresh interpreters
interpreter.py    starts a fresh interpreter
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from nblaunch.start_methods import fork, forkserver, spawn
from nblaunch.start_methods.saved_call import SavedCall
from nblaunch.start_methods.worker_group import WorkerGroup
from nblaunch.wire.assignment import Assignment, FunctionCall
from nblaunch.wire.board import Board

Starter = Callable[[FunctionCall, Sequence[Assignment], Board, SavedCall | None], WorkerGroup]
"""Starts one worker per assignment. It knows nothing of events, logs or results.

Args:
    call: the function and its arguments.
    assignments: one per worker.
    board: their progress.
    saved: the call as it was earlier, which fresh processes load in place of ``call``; None = save it now.

Raises:
    PayloadError: the call can't be sent to workers; names the variable.
    LaunchError: the system refused a process; those already started are gone again.
"""

STARTERS: Mapping[str, Starter] = {"fork": fork.start, "forkserver": forkserver.start, "spawn": spawn.start}
