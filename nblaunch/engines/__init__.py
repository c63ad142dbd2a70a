"""Launches on several machines from one process, through an engine that starts a node program on each of them.

    kernel, or the process of a detached job                     machine 0                     machine 1
    EngineRunner ── Coordinator ── engine ── pipes, ssh, ... ──> node program ── fork ──> ranks 0, 1
                                     └────────────────────────────────────────────────────> node program ──> ranks 2, 3
                                                                    ranks 0, 1  <── gloo / nccl ──>  ranks 2, 3

On each machine, the node program (a clean process) loads the call once and runs its ranks as the launcher does on a
single machine. One coordinator merges the nodes' reports, so results, weights and error messages come from the same
code as on one machine. (:mod:`nblaunch.nodes` is the other way to use several machines: the same notebook on each.)

In the launching process:

    runner.py            runs the job: starts the nodes, attempt after attempt
      coordinator.py     watches one attempt on all nodes; copies the ranks' logs
      link.py            the coordinator's view of a node; a query for the stacks of ranks on several nodes
    kept_nodes.py        Nodes: the machines that an engine keeps between launches
    engine.py            the interface of an engine
      command_engines.py engines that start nodes with a command: processes here, hosts over ssh, nodes of Slurm
      ray.py             nodes of a Ray cluster
        ray_driver.py    the process that is connected to the cluster; its messages
        ray_actor.py     runs on each node and moves bytes

On each node:

    node.py              the entry point of the node program; if nodes are kept between launches, forks a child per job
      node_program.py    loads the call, runs attempts
      uplink.py          exchanges data with the coordinator while ranks run

On both sides:

    channel.py           sealed messages over pipes
    messages.py          the messages
    agreements.py        the step at which ranks of all nodes end
    collectives.py       recorded collectives of the ranks on all nodes
    shipping.py          sends the user's modules and variables; lists packages that nodes must have
"""

from __future__ import annotations

import importlib

from nblaunch.engines.engine import Engine

_MODULES = {
    "processes": "command_engines",
    "ssh": "command_engines",
    "slurm": "command_engines",
    "ray": "ray",
}


def find(name: str) -> type[Engine]:
    """Import and return an engine by its name in ``spec.py``: ``"ssh"`` is ``SshEngine``."""
    module = importlib.import_module(f"nblaunch.engines.{_MODULES[name]}")
    engine: type[Engine] = getattr(module, f"{name.title()}Engine")
    return engine
