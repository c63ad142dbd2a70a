"""Nodes as processes of this machine: to try out a launch on several machines without any, and for tests."""

from __future__ import annotations

import sys

from nblaunch.engines.command_node import PROGRAM, CommandNode, start_all
from nblaunch.engines.engine import Engine, NodeHandle, NodesWanted

_LOOPBACK = "127.0.0.1"


class ProcessesEngine(Engine):
    """Starts each node program as a process of this machine."""

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
