"""Nodes: machines of an engine that stay ready between launches.

Nodes ── HeldEngine ── engine ──> node program on each machine: a template with torch imported (template.py)
launch ── lend ──> the same programs; each forks a child, which runs the job and ends with it
close, or the end of this process ──> the programs end
"""

from __future__ import annotations

import os
import select
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from nblaunch.engines import find
from nblaunch.engines.engine import Engine, NodeHandle, NodesWanted
from nblaunch.errors import LaunchError
from nblaunch.spec import LaunchSpec, NodeEngineName

_CLOSE_S = 3.0


class Nodes:
    """Machines that stay ready between launches, so that only the first launch waits for Python and torch to start.

    On each machine a program imports torch and waits. Each launch forks a fresh process from it, so launches share
    nothing, and nothing that a function changes lasts. The machines are reserved from the first launch until
    :meth:`close`, the end of a ``with`` block, or the end of this object or this process. One job at a time runs on
    them.

    Example::

        with Nodes(2, engine="ray") as nodes:
            notebook_launcher(train, (model,), engine=nodes)  # starts the programs
            notebook_launcher(train, (model,), engine=nodes)  # in less than a second

    A launch on them takes the number of nodes and the engine from here. If one of the programs ends, all of them start
    again in the next launch, which says so. A launch that begins before the engine has noticed the end fails and names
    the node.

    Args:
        num_nodes: number of machines, or ``"min:max"``.
        engine: ``"processes"``, ``"ray"``, ``"ssh"`` or ``"slurm"``, as for :func:`nblaunch.notebook_launcher`.
        hosts: for ``engine="ssh"``, the names of the machines.
        resources_per_node: for ``engine="ray"``, free resources that a node must have. None = as for
            :func:`nblaunch.notebook_launcher`, by the first launch.
        runtime_env: for ``engine="ray"``, the environment of the nodes.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    def __init__(
        self,
        num_nodes: int | str = 1,
        *,
        engine: NodeEngineName,
        hosts: Sequence[str] = (),
        resources_per_node: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
    ) -> None:
        spec = LaunchSpec(
            function=_nothing,
            engine=engine,
            num_nodes=num_nodes,
            hosts=hosts,
            resources_per_node=resources_per_node,
            runtime_env=runtime_env,
        )
        if not spec.is_on_nodes:
            raise ValueError(
                f"engine={engine!r} starts no nodes that could stay ready; engines that do are 'processes', 'ray', "
                "'ssh' and 'slurm'"
            )
        self._spec = spec
        self._engine = HeldEngine(find(spec.engine)())
        weakref.finalize(self, self._engine.retire)

    def __repr__(self) -> str:
        return f"Nodes({self._spec.num_nodes!r}, engine={self._spec.engine!r})"

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a launch on these nodes.

        Args:
            given: the same settings in the call of the launcher, which must have their defaults or these values.

        Raises:
            ValueError: one of them has another value.
        """
        defaults = LaunchSpec(function=_nothing)
        for name, value in given.items():
            value = tuple(value) if isinstance(value, list) else value
            if value not in (getattr(defaults, name), getattr(self._spec, name)):
                raise ValueError(
                    f"{name}={value!r} can't be combined with engine={self!r}: the nodes have been chosen there"
                )
        return {
            **{name: getattr(self._spec, name) for name in given},
            "engine": self._spec.engine,
            "nodes": self._engine,
        }

    def close(self) -> None:
        """End the programs on all machines, and release these. A launch that is running continues to its end."""
        self._engine.retire()

    def __enter__(self) -> Nodes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class HeldEngine(Engine):
    """An engine that keeps its nodes between launches, which take it in turn.

    Args:
        engine: starts them.
    """

    stays = True

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.is_this_machine = engine.is_this_machine
        self._idle: list[NodeHandle] = []
        self._notes: Sequence[str] = ()
        self._in_use = threading.Lock()
        self._is_retired = False
        self._pid = os.getpid()

    def lend(self) -> Engine:
        """Reserve the nodes for a launch, which closes the engine at its end.

        Raises:
            LaunchError: another launch has them, or they were closed.
        """
        if self._is_retired:
            raise LaunchError("these nodes were closed; make new ones with Nodes(...)")
        if not self._in_use.acquire(blocking=False):
            raise LaunchError(
                "another job runs on these nodes; wait for its result, or start this one on other Nodes(...)"
            )
        return self

    def start_nodes(self, wanted: NodesWanted) -> list[NodeHandle]:
        """Return the nodes that are kept, or start them."""
        idle, self._idle = self._idle, []
        ended = [number for number, handle in enumerate(idle) if _has_ended(handle)]
        if idle and not ended:
            return idle
        if ended:
            why = "; ".join(
                f"node {number} (host {idle[number].host}): {idle[number].how_ended()}" for number in ended
            )
            wanted.note(
                f"the programs of all nodes start again, since some ended while they were not in use: {why}"
            )
            self._end(idle)
        handles = self._engine.start_nodes(wanted)
        self._notes = self._engine.notes()
        return handles

    def notes(self) -> Sequence[str]:
        """Return what the engine has to say, once for all launches on the same nodes."""
        notes, self._notes = self._notes, ()
        return notes

    def keep(self, handles: Sequence[NodeHandle]) -> None:
        """Keep these nodes for the next launch: their programs wait for it."""
        self._idle = list(handles)

    def close(self) -> None:
        """End the use by a launch. What it has not kept, it has closed."""
        if not self._idle or self._is_retired:
            self._end(self._idle)
        self._in_use.release()

    def retire(self) -> None:
        """End the nodes, now or at the end of the launch that uses them; not in a forked process."""
        if os.getpid() != self._pid:
            # Its pipes are closed here, and other files may have their numbers: Python must not close them.
            _kept_from_collection.append(self)
            return
        self._is_retired = True
        if self._in_use.acquire(blocking=False):
            self.close()

    def _end(self, handles: Sequence[NodeHandle]) -> None:
        for handle in handles:
            handle.close(_CLOSE_S)
        self._idle = []
        self._engine.close()


_kept_from_collection: list[HeldEngine] = []


def _has_ended(handle: NodeHandle) -> bool:
    """Return whether the program of a node has ended, without reading what it has sent."""
    poller = select.poll()
    poller.register(handle.reading_fd, getattr(select, "POLLRDHUP", 0))
    return bool(poller.poll(0))


def _nothing() -> None:
    """Stand for the function of launches that are to come."""
