"""Messages between the launching process and the driver of Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nblaunch.events import Event


@dataclass(frozen=True)
class DriverTask:
    """What a driver process is started with.

    Args:
        address: address of the cluster; empty = one of this machine, or a new one.
        min_nodes: how many nodes are needed.
        max_nodes: how many are wanted.
        resources: of each; empty = by the ranks.
        ranks_per_node: how many ranks each runs; None = one per device.
        backend: device family that was asked for.
        runtime_env: as Ray takes it.
        timeout_s: for nodes that are in use.
        waits_for_others: wait as long for nodes that the cluster does not have, as an autoscaler may add them.
        node_fds: a socket for the bytes of each node.
        event_fd: pipe for what follows.
        life_fd: pipe whose end means that the launching process has no more use for the nodes.
        log_path: file for what Ray prints.
    """

    address: str
    min_nodes: int
    max_nodes: int
    resources: Mapping[str, float]
    ranks_per_node: int | None
    backend: str
    runtime_env: Mapping[str, Any]
    timeout_s: float
    waits_for_others: bool
    node_fds: tuple[int, ...]
    event_fd: int
    life_fd: int
    log_path: str


@dataclass(frozen=True)
class DriverNote(Event):
    """A line for the user while nodes are waited for."""

    text: str = ""


@dataclass(frozen=True)
class Allocated(Event):
    """Nodes were given, or ``error`` says why not.

    Args:
        hosts: names of the machines.
        addresses: as the others reach them.
        notes: what users should know of the cluster.
    """

    hosts: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    error: str = field(default="")


@dataclass(frozen=True)
class NodeEnded(Event):
    """The program of a node has ended."""

    number: int = 0
    why: str = ""
