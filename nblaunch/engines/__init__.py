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
      command_engines.py engines that start nodes with a command: processes here, hosts over ssh, Slurm nodes ray.py
      nodes of a Ray cluster
        ray_driver.py    the process that is connected to the cluster; its messages
        ray_actor.py     runs on each node and moves bytes

On each node:

    node.py              the entry point of the node program; if nodes are kept between launches, forks a child per job
      node_program.py    loads the call, runs attempts
      uplink.py          exchanges data with the coordinator while ranks are running

On both sides:

    channel.py           sealed messages over pipes
    messages.py          the messages
    agreements.py        the step at which ranks on all nodes end
    collectives.py       recorded collectives of the ranks on all nodes
    shipping.py          sends the user's modules and variables; lists packages that nodes must have

The interface of an engine is :class:`Engine`, which starts the node program on machines and carries bytes to and from
them:

    Engine ── start_nodes ──> NodeHandle per machine: a pipe to the program, a pipe from it, and its exit reason
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nblaunch.spec import LaunchSpec

NODE_MODULE = "nblaunch.engines.node"
"""The program that an engine starts. Its ``main()`` communicates through standard input and output."""


@dataclass(frozen=True)
class NodesWanted:
    """The machines that a job requests from an engine.

    Args:
        spec: settings of the launch, including the engine's own.
        log_path: returns the file for the output of the program on the n-th machine.
        check: called several times a second while an engine waits; raises an error if the job was interrupted or
            cancelled.
        note: receives a line for the user.
        path: module search path of this process.
        folder: working folder of this process; None if it was removed.
        environment: environment of this process.
    """

    spec: LaunchSpec
    log_path: Callable[[int], Path]
    check: Callable[[], None]
    note: Callable[[str], None]
    path: Sequence[str]
    folder: str | None
    environment: Mapping[str, str]

    @property
    def interpreter_variables(self) -> dict[str, str]:
        """Variables that Python reads when it starts.

        With the same hash seed, all ranks iterate over a set of strings in the same order.
        """
        return {name: value for name, value in self.environment.items() if name == "PYTHONHASHSEED"}


class NodeHandle(ABC):
    """The node program on one machine.

    Attributes:
        host: name of the machine, for messages.
        address: address at which other machines reach it; empty if the program determines it.
        reading_fd: descriptor for reading from the program. End of file means that the program has ended.
        writing_fd: descriptor for writing to the program.
    """

    host: str
    address: str
    reading_fd: int
    writing_fd: int

    @abstractmethod
    def how_ended(self) -> str:
        """Return the reason why the program ended, such as ``its process was killed by SIGKILL``.

        Called once :attr:`reading_fd` has reached the end of file.
        """

    @abstractmethod
    def kill(self) -> None:
        """End the program immediately, or the part of it that this process can reach."""

    @abstractmethod
    def close(self, patience_s: float) -> None:
        """Close both pipes, which ends the program; kill it if it is still running after ``patience_s`` seconds."""


class Engine(ABC):
    """Starts the node program on machines. An engine must be closed; once closed, it leaves nothing behind.

    An engine knows nothing about ranks, training or failures. To add one, write a class such as ``SshEngine`` in this
    folder, and add its name to :data:`_MODULES` and ``spec.py``. ``tests/contracts/test_engine.py`` shows the
    requirements.

    Attributes:
        is_this_machine: whether the nodes are processes on this machine, with its files and environment.
        keeps_nodes: whether the nodes are kept for further jobs (``kept_nodes.py``).
    """

    is_this_machine = False
    keeps_nodes = False

    @abstractmethod
    def start_nodes(self, wanted: NodesWanted) -> list[NodeHandle]:
        """Start the program on at least ``wanted.spec.min_nodes`` machines, and on up to ``max_nodes``.

        The job calls this again after a node has been lost, once all handles are closed.

        Raises:
            LaunchError: there are too few machines. The message lists the requested and the available ones.
        """

    def keep(self, handles: Sequence[NodeHandle]) -> None:
        """When a job ends, keep its nodes for the next job if :attr:`keeps_nodes` is set. Their handles are open."""

    def take_kept(self) -> list[NodeHandle]:
        """Return the nodes that the engine has kept, and stop keeping them. Their programs may have ended."""
        return []

    def close(self) -> None:
        """Release the engine's resources. All handles that it does not keep have been closed."""

    def notes(self) -> Sequence[str]:
        """Return facts that users should see once, for example that others can reach the cluster."""
        return ()


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
