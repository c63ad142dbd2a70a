"""Start methods, one file each.

The argument ``engine`` of ``notebook_launcher`` chooses between worker processes (``"local"``, and ``"elastic"`` with
other machines: both are started by these) and ``"inline"``.

base.py               StartMethod, which starts workers, and WorkerGroup, by which they are watched
fork.py               forks of this process
forkserver.py         forks of a clean interpreter
spawn.py              fresh interpreters
inline.py             none of them: the function runs in this process
children.py           a group of child processes: wait, signal, reap
saved_call.py         the call as it was at one moment, for fresh interpreters
interpreter.py        starts a fresh interpreter
interpreter_main.py   what that does
"""

from __future__ import annotations

from nblaunch.start_methods.base import StartMethod
from nblaunch.start_methods.fork import Fork
from nblaunch.start_methods.forkserver import Forkserver
from nblaunch.start_methods.spawn import Spawn


def find(name: str) -> StartMethod:
    """Return a start method by its name: ``"fork"``, ``"forkserver"`` or ``"spawn"``."""
    known = {method.name: method for method in (Fork, Forkserver, Spawn)}
    return known[name]()
