"""The function in this very process, as the only rank: for pdb, profilers and tests.

Not an :class:`nblaunch.engines.base.Engine`, because there is no process to watch: exceptions and interrupts take
their ordinary way, and breakpoints work.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nblaunch import context, env
from nblaunch.backends import process_group
from nblaunch.backends.base import Backend
from nblaunch.context import WorkerContext
from nblaunch.engines.base import Call
from nblaunch.topology import Topology


def run_inline(call: Call, topology: Topology, backend: Backend, defaults: Mapping[str, Any]) -> Any:
    """Call the function as rank 0 of 1 and return its value; context and environment are put back afterwards."""
    function, args = call
    before = context.take()
    was_in_group = process_group.is_joined()
    with env.patched(topology.to_env() | backend.worker_env(topology)):
        context.install(
            WorkerContext(topology=topology, backend=backend, defaults=defaults, is_launched=True)
        )
        try:
            return function(*args)
        finally:
            context.put_back(before)
            if not was_in_group:
                process_group.leave()
