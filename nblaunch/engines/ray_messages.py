"""Messages between the launching process and the Ray driver."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nblaunch.events import Event


@dataclass(frozen=True)
class DriverTask:
    """The input of a driver process.

    Args:
        address: address of the cluster; empty = a cluster on this machine, or a new one.
        min_nodes: smallest number of nodes.
        max_nodes: maximum number of nodes.
        resources: resources of each node; empty = determined by the ranks.
        ranks_per_node: number of ranks per node; None = one per device.
        backend: requested device family.
        runtime_env: runtime environment in Ray's format.
        variables: environment variables of the node programs, which ``runtime_env`` may change.
        timeout_s: how long to wait for nodes that are in use.
        waits_for_others: also wait for nodes that the cluster lacks, because an autoscaler may add them.
        node_fds: one socket per node for its bytes.
        event_fd: pipe for the messages below.
        life_fd: pipe that is closed when the launching process no longer needs the nodes.
        log_path: file for what Ray prints.
    """

    address: str
    min_nodes: int
    max_nodes: int
    resources: Mapping[str, float]
    ranks_per_node: int | None
    backend: str
    runtime_env: Mapping[str, Any]
    variables: Mapping[str, str]
    timeout_s: float
    waits_for_others: bool
    node_fds: tuple[int, ...]
    event_fd: int
    life_fd: int
    log_path: str


@dataclass(frozen=True)
class DriverNote(Event):
    """A line for the user while the driver waits for nodes."""

    text: str = ""


@dataclass(frozen=True)
class Allocated(Event):
    """The cluster granted nodes, or ``error`` says why not.

    Args:
        hosts: names of the machines.
        addresses: addresses at which the other nodes reach them.
        notes: facts about the cluster that users should know.
    """

    hosts: tuple[str, ...] = ()
    addresses: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    error: str = field(default="")


@dataclass(frozen=True)
class NodeEnded(Event):
    """A node's program has ended."""

    number: int = 0
    why: str = ""
