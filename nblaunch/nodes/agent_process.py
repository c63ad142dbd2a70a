"""The process of the agent, started by the launcher of the same node, and its configuration.

    node 0                                                   node 1
    launcher ── fork ──> workers 0, 1  <── gloo / nccl ──>  workers 2, 3 <── fork ── launcher
       ^                                                                                ^
       └── pipes ── agent 0  <── store: rendezvous, ranks, barrier, heartbeats ──>  agent 1 ──┘

torch's agent usually starts workers as its own children. Forked workers could then inherit neither the function nor the
model of the notebook, and events, logs, diagnosis, results, trained weights and escalation would need a second
implementation. So the agent, ``SimpleElasticAgent`` with its rendezvous handlers (which nodes take part, which ranks
they get, restarts, the exit barrier, nodes that come back), runs in a fresh process, where its threads and signal
handlers do not affect the kernel. It sends messages to the launcher, which starts and supervises workers as on one
machine. See ``nodes/agent.py``.

There are two differences from torchrun. Workers do not share the store of the agents: each start has a new store in
the agent of node 0, so that no value of an earlier start is read by mistake. And no store listens on all interfaces.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass, field, replace
from typing import Any

from nblaunch import env
from nblaunch.errors import LaunchError
from nblaunch.events import Event
from nblaunch.host import descriptors
from nblaunch.host.descriptors import is_writable, wait_until_readable
from nblaunch.start_methods.children import kill_and_reap, open_pidfd, reap_with_group
from nblaunch.start_methods.interpreter import start_program
from nblaunch.start_methods.spawn import disown
from nblaunch.wire.channel import EventReceiver, EventSender

LINGER_S = 4.0
"""Longest time in seconds for which an agent waits until the others have received its last heartbeat."""

_EXIT_S = LINGER_S + 2.0


@dataclass(frozen=True)
class RendezvousConfig:
    """Configuration of the rendezvous.

    Args:
        backend: ``"static"`` or ``"c10d"``.
        host: address of the store.
        port: its TCP port.
        listen_fd: listening socket of the store on the node that hosts it; -1 on the others.
        run_id: name of the job.
        node_rank: requested rank of this node.
        min_nodes: smallest number of nodes.
        max_nodes: largest number of nodes.
        timeout_s: seconds in which all nodes must join.
        conf: further settings, with torch's names.
    """

    backend: str
    host: str
    port: int
    listen_fd: int
    run_id: str
    node_rank: int
    min_nodes: int
    max_nodes: int
    timeout_s: float
    conf: dict[str, Any] = field(default_factory=dict)

    @property
    def shared_settings(self) -> str:
        """Return the settings that must be equal on all nodes; otherwise they would wait for each other."""
        is_fixed = self.min_nodes == self.max_nodes
        num_nodes = str(self.max_nodes) if is_fixed else f"{self.min_nodes}:{self.max_nodes}"
        return f"rdzv_backend={self.backend} and num_nodes={num_nodes}"

    @property
    def endpoint(self) -> str:
        """Return ``host:port``, with an IPv6 address in brackets."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True)
class AgentConfig:
    """Configuration of an agent.

    Args:
        rendezvous: configuration of the rendezvous.
        num_workers: of this node.
        max_restarts: of all workers.
        monitor_interval_s: seconds between polls of torch's agent.
        address: of this node, as the others reach it.
        host_name: of this machine.
        log_path: file for the output of torch.
        reading_fd: pipe from the launcher; set when the process is started.
        writing_fd: pipe to the launcher; likewise.
    """

    rendezvous: RendezvousConfig
    num_workers: int
    max_restarts: int
    monitor_interval_s: float
    address: str
    host_name: str
    log_path: str
    reading_fd: int = -1
    writing_fd: int = -1


class AgentProcess:
    """The process of this node's agent.

    Args:
        config: of the agent. The caller keeps the listening socket in it.

    Raises:
        LaunchError: the system refused the process.
    """

    def __init__(self, config: AgentConfig) -> None:
        agent_reads, self._writing = os.pipe()
        self._reading, agent_writes = os.pipe()
        descriptors.keep_from_children(self._writing, self._reading)
        try:
            self._pid = _start(replace(config, reading_fd=agent_reads, writing_fd=agent_writes))
        except BaseException:
            descriptors.close(self._writing, self._reading)
            raise
        finally:
            os.close(agent_reads)
            os.close(agent_writes)
        self._pidfd = open_pidfd(self._pid)
        self._sender = EventSender(self._writing)
        self._receiver = EventReceiver(self._reading)

    def fileno(self) -> int:
        """Return a descriptor that is readable when the agent has sent a message or has ended."""
        return self._reading

    def receive(self) -> tuple[list[Event], bool]:
        """Return the messages since the last call, and whether the agent has closed the connection."""
        return self._receiver.receive()

    def send(self, message: Event) -> None:
        """Send a message. If the agent has died, :meth:`receive` reports it, not this method."""
        self._sender.send(message)

    def send_if_ready(self, message: Event) -> None:
        """Send a message unless the pipe is full."""
        if is_writable(self._writing):
            self._sender.send(message)

    def close(self, patience_s: float = _EXIT_S) -> None:
        """Wait at most ``patience_s`` seconds until the agent exits, then kill it."""
        deadline = time.monotonic() + patience_s
        while (status := reap_with_group(self._pid)) is None and time.monotonic() < deadline:
            _wait_for_end(self._pidfd)
        if status is None:
            kill_and_reap([self._pid])
        if self._pidfd is not None:
            descriptors.close(self._pidfd)
        descriptors.close(self._writing, self._reading)


def _wait_for_end(pidfd: int | None) -> None:
    if pidfd is None:
        time.sleep(0.02)
    else:
        wait_until_readable([pidfd], 0.1)


def _start(config: AgentConfig) -> int:
    descriptors_of_agent = [config.reading_fd, config.writing_fd, config.rendezvous.listen_fd]
    changes = {
        "OMP_NUM_THREADS": "1",
        # Without it torch's handler would open a store for workers on all interfaces.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    try:
        # The agent keeps those signals blocked that are blocked at its start: a batch system signals all processes of
        # a job, and the launcher decides what to do.
        return disown(
            start_program(
                "nblaunch.nodes.agent",
                config,
                inherited=[fd for fd in descriptors_of_agent if fd >= 0],
                environment={**env.snapshot(), **changes},
            )
        )
    except OSError as error:
        raise LaunchError(
            f"the agent of this node, which joins the rendezvous, could not be started ({sys.executable}): {error}"
        ) from error
