"""Hosts over ``ssh``, each with Python, nblaunch, and a key that needs no password.

    ssh host 'exec python -c ...'      encrypted and authenticated by ssh, which has the only socket

The node program ends when the connection closes. Users set ports, names and keys in ``~/.ssh/config``.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping

from nblaunch.engines.command_node import PROGRAM, CommandNode, start_all
from nblaunch.engines.engine import Engine, NodeHandle, NodesWanted

_CONNECT_S = 10
_ALIVE_S = 5
_OPTIONS = (
    "-T",
    "-oBatchMode=yes",
    f"-oConnectTimeout={_CONNECT_S}",
    f"-oServerAliveInterval={_ALIVE_S}",
    "-oServerAliveCountMax=3",
)
"""Options of ``ssh``: no terminal and no prompts; a silent connection ends after 15 seconds. Source: ssh_config(5)."""


class SshEngine(Engine):
    """Starts each node program over ``ssh``."""

    def start_nodes(self, wanted: NodesWanted) -> list[NodeHandle]:
        """Connect to the first ``max_nodes`` hosts."""
        hosts = wanted.spec.hosts[: wanted.spec.max_nodes]
        command = remote_command(sys.executable, wanted.interpreter_variables)
        return start_all(
            CommandNode(["ssh", *_OPTIONS, host, command], host, wanted.log_path(number))
            for number, host in enumerate(hosts)
        )


def remote_command(python: str, variables: Mapping[str, str]) -> str:
    """Return the shell command for the node program, with the same interpreter if it exists, else ``python3``."""
    same, program = shlex.quote(python), shlex.quote(PROGRAM)
    exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in variables.items())
    return f"{exports}if [ -x {same} ]; then exec {same} -c {program}; else exec python3 -c {program}; fi"
