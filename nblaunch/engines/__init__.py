"""Launches on several machines from one process, through an engine that starts a node program on each of them.

    kernel, or the process of a detached job                     machine 0                     machine 1
    EngineRunner ── Coordinator ── engine ── pipes, ssh, ... ──> node program ── fork ──> ranks 0, 1
                                     └────────────────────────────────────────────────────> node program ──> ranks 2, 3
                                                                    ranks 0, 1  <── gloo / nccl ──>  ranks 2, 3

On each machine a clean process, the node program, loads the call once and runs its ranks as the launcher of one machine
does. One coordinator merges what the nodes report, so that results, weights, errors and their texts come about by the
same code as on one machine. (:mod:`nblaunch.nodes` is the other way to several machines: the same notebook on each.)

In the launching process:

    runner.py            runs the job: starts the nodes, attempt after attempt
      coordinator.py     watches one attempt on all nodes
      link.py            one node, as the coordinator sees it
      stacks.py          nodes that have been asked where their ranks are
    engine.py            what an engine is; one file each:
      processes.py       processes of this machine
      ssh.py             hosts that ssh reaches
      slurm.py           nodes of the Slurm allocation of this process
      ray.py             nodes of a Ray cluster
        ray_driver.py    process that is connected to it
        ray_actor.py     what runs on each node, and moves bytes
        ray_messages.py  between launching process and driver
      command_node.py    what engines have in common whose node program runs below a command of this machine

On each node:

    node.py              the first lines of the node program
      node_program.py    loads the call, runs attempts
      uplink.py          what goes up to the coordinator while ranks run, and comes down from it

In both:

    channel.py           sealed messages over pipes
    messages.py          the messages
    agreements.py        the step at which ranks of all nodes end
    collectives.py       what ranks of all nodes have recorded of their collectives
    shipping.py          the user's modules and variables; what nodes must have themselves
"""

from __future__ import annotations

import importlib

from nblaunch.engines.engine import Engine

_ENGINES = {
    "processes": ("nblaunch.engines.processes", "ProcessesEngine"),
    "ssh": ("nblaunch.engines.ssh", "SshEngine"),
    "ray": ("nblaunch.engines.ray", "RayEngine"),
    "slurm": ("nblaunch.engines.slurm", "SlurmEngine"),
}
"""Name -> module and class, of which only the one in use is imported."""


def find(name: str) -> type[Engine]:
    """Return the engine called ``name``."""
    module, cls = _ENGINES[name]
    engine: type[Engine] = getattr(importlib.import_module(module), cls)
    return engine
