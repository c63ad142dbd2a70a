"""Nodes as processes on this machine, for tests and for trying out a launch on several machines."""

from __future__ import annotations

import sys

from nblaunch.engines.command_node import PROGRAM, CommandNode, start_all
from nblaunch.engines.engine import Engine, NodeHandle, NodesWanted

_LOOPBACK = "127.0.0.1"


class ProcessesEngine(Engine):
    """Starts each node program as a process on this machine."""

    is_this_machine = True

    def start_nodes(self, wanted: NodesWanted) -> list[NodeHandle]:
        """Start ``max_nodes`` processes."""
        path = [entry for entry in wanted.path if isinstance(entry, str)]
        program = f"import sys; sys.path[:] = {path!r}; {PROGRAM}"
        return start_all(
            CommandNode(
                [sys.executable, "-c", program],
                "this machine",
                wanted.log_path(number),
                address=_LOOPBACK,
                environment=wanted.environment,
                folder=wanted.folder,
            )
            for number in range(wanted.spec.max_nodes)
        )
