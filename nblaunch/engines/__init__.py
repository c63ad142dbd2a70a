"""How workers come to be. Local processes start by fork, through a forkserver, or by spawn: one file each."""

from __future__ import annotations

from nblaunch.engines.base import Engine
from nblaunch.engines.fork import ForkEngine
from nblaunch.engines.forkserver import ForkserverEngine
from nblaunch.engines.spawn import SpawnEngine


def local(start_method: str) -> Engine:
    """Return the engine for workers on this machine: ``"fork"``, ``"forkserver"`` or ``"spawn"``."""
    engines = {engine.name: engine for engine in (ForkEngine, ForkserverEngine, SpawnEngine)}
    return engines[start_method]()
