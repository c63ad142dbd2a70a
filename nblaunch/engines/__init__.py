"""Start methods, one file each.

An Engine here is a start method. The argument ``engine`` of ``notebook_launcher`` chooses between worker processes
(``"local"``, and ``"elastic"`` with other machines: both are started by these) and ``"inline"``. DeepSpeed's engine is
unrelated.

base.py               Engine, which starts workers, and WorkerGroup, by which they are watched
fork.py               forks of this process
forkserver.py         forks of a clean interpreter
spawn.py              fresh interpreters
inline.py             no worker: the function runs in this process
children.py           a group of child processes: wait, signal, reap
saved_call.py         the call as it was at one moment, for fresh interpreters
interpreter.py        starts a fresh interpreter
interpreter_main.py   what that does
"""

from __future__ import annotations

from nblaunch.engines.base import Engine
from nblaunch.engines.fork import ForkEngine
from nblaunch.engines.forkserver import ForkserverEngine
from nblaunch.engines.spawn import SpawnEngine


def find(start_method: str) -> Engine:
    """Return the engine for workers on this machine: ``"fork"``, ``"forkserver"`` or ``"spawn"``."""
    engines = {engine.name: engine for engine in (ForkEngine, ForkserverEngine, SpawnEngine)}
    return engines[start_method]()
