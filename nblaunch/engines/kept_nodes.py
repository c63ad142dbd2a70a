"""Nodes: the machines that an engine keeps between launches.

Nodes ── KeptEngine ── engine ──> node program on each machine: a forkserver with torch imported (node.py)
launch ── lend ──> the same programs; each forks a child, which runs the job and ends with it
close, or the end of this process ──> the programs end
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, get_args

from nblaunch.engines import Engine, NodeHandle, NodesWanted, find
from nblaunch.errors import LaunchError
from nblaunch.spec import LaunchSpec, NodeEngineName

_CLOSE_S = 3.0


class Nodes:
    """Machines that are kept between launches, so that Python and torch have to start only for the first launch.

    On each machine a program imports torch and waits. Each launch forks a fresh process from it, so launches share
    nothing, and a function's changes do not persist. The machines are reserved from the first launch until
    :meth:`close` is called, the ``with`` block ends, this object is deleted, or this process ends. One job at a time
    runs on them.

    Example::

        with Nodes(2, engine="ray") as nodes:
            notebook_launcher(train, (model,), engine=nodes)  # starts the programs
            notebook_launcher(train, (model,), engine=nodes)  # in less than a second

    A launch on these nodes takes their number and the engine from this object. If one of the programs ends between
    launches, the next launch starts all of them again, and a note says why.

    Args:
        num_nodes: number of machines, or ``"min:max"``.
        engine: ``"processes"``, ``"ray"``, ``"ssh"`` or ``"slurm"``, as for :func:`nblaunch.notebook_launcher`.
        hosts: for ``engine="ssh"``, the names of the machines.
        resources_per_node: for ``engine="ray"``, free resources that a node must have. None = determined by the first
            launch, as for :func:`nblaunch.notebook_launcher`.
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
            function=int,  # any: launches bring their own
            engine=engine,
            num_nodes=num_nodes,
            hosts=hosts,
            resources_per_node=resources_per_node,
            runtime_env=runtime_env,
        )
        if not spec.is_on_nodes:
            raise ValueError(
                f"engine={engine!r} does not start nodes that can be kept; valid engines are "
                f"{', '.join(map(repr, get_args(NodeEngineName)))}"
            )
        self._spec = spec
        self._engine = KeptEngine(find(spec.engine)())
        weakref.finalize(self, self._engine.retire)

    def __repr__(self) -> str:
        return f"Nodes({self._spec.num_nodes!r}, engine={self._spec.engine!r})"

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a launch on these nodes.

        Args:
            given: these settings as passed to the launcher; each must have its default value or this object's value.

        Raises:
            ValueError: a setting has a different value.
        """
        defaults = LaunchSpec(function=int)
        for name, value in given.items():
            value = tuple(value) if isinstance(value, list) else value
            if value not in (getattr(defaults, name), getattr(self._spec, name)):
                raise ValueError(
                    f"{name}={value!r} can't be combined with engine={self!r}, which has already chosen the nodes"
                )
        return {
            **{name: getattr(self._spec, name) for name in given},
            "engine": self._spec.engine,
            "nodes": self._engine,
        }

    def close(self) -> None:
        """End the programs on all machines, and release the machines. A running launch is not interrupted."""
        self._engine.retire()

    def __enter__(self) -> Nodes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class KeptEngine(Engine):
    """An engine that keeps its nodes between launches, which use it one at a time.

    Args:
        engine: the engine that starts the nodes.
    """

    keeps_nodes = True

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.is_this_machine = engine.is_this_machine
        self._kept: list[NodeHandle] = []
        self._notes: Sequence[str] = ()
        self._in_use = threading.Lock()
        self._is_retired = self._is_closed = False
        self._pid = os.getpid()

    def lend(self) -> Engine:
        """Reserve the nodes for a launch; return their engine, which the launch closes when it ends.

        Raises:
            LaunchError: another launch is using the nodes, they were closed, or another process started them.
        """
        if os.getpid() != self._pid:  # their pipes are closed here
            raise LaunchError(
                f"these nodes belong to process {self._pid}, from which this process was forked; make new ones with "
                "Nodes(...)"
            )
        if self._is_retired:
            raise LaunchError("these nodes were closed; make new ones with Nodes(...)")
        if not self._in_use.acquire(blocking=False):
            raise LaunchError(
                "another job is running on these nodes; wait for its result, or start this job on other Nodes(...)"
            )
        return self

    def take_kept(self) -> list[NodeHandle]:
        """Return the nodes of the previous launch."""
        kept, self._kept = self._kept, []
        return kept

    def start_nodes(self, wanted: NodesWanted) -> list[NodeHandle]:
        """Start nodes that later launches can use."""
        handles = self._engine.start_nodes(wanted)
        self._notes = self._engine.notes()
        return handles

    def notes(self) -> Sequence[str]:
        """Return the engine's notes, once for all launches on the same nodes."""
        notes, self._notes = self._notes, ()
        return notes

    def keep(self, handles: Sequence[NodeHandle]) -> None:
        """Keep these nodes for the next launch: their programs wait for it."""
        self._kept = list(handles)

    def close(self) -> None:
        """End the reservation of the nodes. The launch has already closed all handles that it did not keep."""
        if not self._kept or self._is_retired:
            for handle in self.take_kept():
                handle.close(_CLOSE_S)
            self._engine.close()
            self._is_closed = self._is_retired
        self._in_use.release()
        self._close_if_retired()  # if another thread has called retire() in the meantime

    def retire(self) -> None:
        """End the nodes immediately, or when the launch that uses them ends. In a forked process, leave them alone."""
        if os.getpid() != self._pid:
            # The engine's pipes are already closed in this process, and other files may have reused their descriptors,
            # which Python must not close.
            _never_collected.append(self)
            return
        self._is_retired = True
        self._close_if_retired()

    def _close_if_retired(self) -> None:
        if self._is_retired and not self._is_closed and self._in_use.acquire(blocking=False):
            self.close()


_never_collected: list[KeptEngine] = []
