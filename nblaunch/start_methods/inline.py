"""Runs the function in this process, as the only rank: for pdb, profilers and tests.

It is not one of the starters, because there is no process to watch: exceptions and interrupts propagate as usual, and
breakpoints work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nblaunch import context, env
from nblaunch.backends import process_group
from nblaunch.backends.base import Backend
from nblaunch.context import ProcessContext
from nblaunch.events import Event
from nblaunch.topology import Topology
from nblaunch.wire.assignment import FunctionCall
from nblaunch.wire.pickling import payload


def run_inline(
    call: FunctionCall,
    topology: Topology,
    backend: Backend,
    accelerator_defaults: Mapping[str, Any],
    emit: Callable[[Event], None],
    environment: Mapping[str, str],
    is_spmd: bool,
) -> Any:
    """Call the function as rank 0 of 1 and return its value; restore the context and the environment afterwards.

    Args:
        call: the function and its arguments.
        topology: topology of the only rank.
        backend: the device family that the function computes on.
        accelerator_defaults: as in :class:`nblaunch.context.ProcessContext`.
        emit: receives the function's events, such as metrics, in the thread that emits them.
        environment: additional variables to set during the call.
        is_spmd: let this process drive all devices; it then does so until it exits.

    Raises:
        RuntimeError: it is too late for ``is_spmd``, because the process already uses one device.
    """
    function, args = call
    before = context.take()
    was_in_group = process_group.is_joined()
    spanning = backend.spmd_env() if is_spmd else None
    settings = {**topology.to_env(), **environment, **backend.worker_env(topology), **(spanning or {})}
    with env.patched(settings):
        if is_spmd:
            backend.enable_spmd()
        context.install(
            ProcessContext(
                topology=topology,
                backend=backend,
                emit=emit,
                accelerator_defaults=accelerator_defaults,
                is_launched=True,
            )
        )
        try:
            with payload.cells_sent_by_value():
                return function(*args)
        finally:
            context.install(before)
            if not was_in_group:
                process_group.leave()
            backend.empty_cache()  # torch would otherwise keep memory that the function has freed
