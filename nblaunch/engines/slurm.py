"""Nodes of the Slurm allocation in which this process runs, such as a notebook under ``salloc``: one ``srun`` per node.

Slurm transports the data, with the site's encryption and authentication; nblaunch opens no socket.
"""

from __future__ import annotations

import subprocess
import sys

from nblaunch import env
from nblaunch.engines.command_node import PROGRAM, CommandNode, start_all
from nblaunch.engines.engine import Engine, NodeHandle, NodesWanted
from nblaunch.errors import LaunchError

_TIMEOUT_S = 30.0
_OPTIONS = ("--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--mem=0")
"""Options to run one task on the node alongside the kernel's own step, with all cores and memory of the allocation."""


class SlurmEngine(Engine):
    """Starts each node program as a step of the current allocation."""

    def start_nodes(self, wanted: NodesWanted) -> list[NodeHandle]:
        """Start a step on the first ``max_nodes`` nodes of the allocation."""
        hosts = _allocated()
        spec = wanted.spec
        if len(hosts) < spec.min_nodes:
            raise LaunchError(
                f"num_nodes={spec.num_nodes!r}, but this Slurm allocation (job {env.read('SLURM_JOB_ID')}) has "
                f"{len(hosts)}: {', '.join(hosts)}. Allocate more: salloc --nodes={spec.min_nodes}"
            )
        return start_all(
            CommandNode(
                ["srun", *_OPTIONS, f"--nodelist={host}", sys.executable, "-c", PROGRAM],
                host,
                wanted.log_path(number),
                environment=wanted.environment,
            )
            for number, host in enumerate(hosts[: spec.max_nodes])
        )


def _allocated() -> list[str]:
    """Return the hosts of the current allocation.

    Raises:
        LaunchError: there is no allocation, or Slurm's commands are missing.
    """
    nodes = env.read("SLURM_JOB_NODELIST")
    if not nodes:
        raise LaunchError(
            "engine='slurm' starts ranks inside a Slurm allocation, but this process is not in one (SLURM_JOB_NODELIST "
            "is not set): start Jupyter with salloc or sbatch"
        )
    try:
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", nodes],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(
            f"the nodes of the allocation, {nodes}, can't be listed by scontrol: {error}"
        ) from error
    return listed.stdout.split()
