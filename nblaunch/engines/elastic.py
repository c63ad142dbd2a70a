"""Workers that join those of other machines: torch's elastic agent finds the nodes, a local engine starts the workers.

    node 0                                                   node 1
    launcher ── fork ──> workers 0, 1  <── gloo / nccl ──>  workers 2, 3 <── fork ── launcher
       ^                                                                                ^
       └── pipes ── agent 0  <── store: rendezvous, ranks, barrier, news ──>  agent 1 ──┘

torch's agent usually starts workers itself, as children of its own. Then they could have neither the function nor the
model of the notebook by fork, and everything that watches workers here (events, logs, diagnosis, results, trained
weights, the way down after an interrupt) would need a second path through it. So the agent keeps what is its own,
``SimpleElasticAgent`` with its rendezvous handlers (who takes part, who gets which ranks, restarts, the exit barrier,
nodes that come back), in a fresh process, where its threads and signal handlers are out of the kernel's way; and its
four abstract methods about workers are answered by messages to the launcher, which starts them by fork, forkserver or
spawn, and watches them, just as on one machine. See ``engines/agent.py``.

Two things of torch's are not used. Workers do not share the agents' store: each start gets a store of its own on node
0, so that nothing of a former start can be read by mistake. And no store listens on all interfaces.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nblaunch import env
from nblaunch.engines.children import kill_and_reap, open_pidfd, reap_with_group
from nblaunch.engines.interpreter import start_program
from nblaunch.engines.spawn import disown
from nblaunch.errors import LaunchError
from nblaunch.events import Event
from nblaunch.wire import descriptors
from nblaunch.wire.channel import EventReceiver, EventSender
from nblaunch.wire.polling import is_writable, wait_until_readable

LINGER_S = 4.0
"""How long an agent stays at most so that the others hear its last news."""

_EXIT_S = LINGER_S + 2.0


@dataclass(frozen=True)
class Meeting:
    """What to meet for, and where.

    Args:
        backend: ``"static"`` or ``"c10d"``.
        host: address of the store.
        port: its TCP port.
        listen_fd: listening socket of the store on the node that hosts it; -1 on the others.
        run_id: name of the job.
        node_rank: which this node was asked to have.
        min_nodes: how many will do.
        max_nodes: how many may come.
        timeout_s: time to find each other.
        conf: further settings, by torch's names.
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
    def terms(self) -> str:
        """What nodes that differ in it could never agree on: each would wait for others than those that come."""
        is_fixed = self.min_nodes == self.max_nodes
        num_nodes = str(self.max_nodes) if is_fixed else f"{self.min_nodes}:{self.max_nodes}"
        return f"rdzv_backend={self.backend} and num_nodes={num_nodes}"

    @property
    def where(self) -> str:
        """``host:port``, as people write it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


@dataclass(frozen=True)
class Orders:
    """What an agent is told when it starts.

    Args:
        meeting: where to meet.
        num_workers: of this node.
        max_restarts: how often they may be started again.
        monitor_interval_s: between torch's looks at them.
        address: of this node, as the others reach it.
        host_name: of this machine.
        reading_fd: from the launcher.
        writing_fd: to the launcher.
        log_path: file for what torch prints.
    """

    meeting: Meeting
    num_workers: int
    max_restarts: int
    monitor_interval_s: float
    address: str
    host_name: str
    reading_fd: int
    writing_fd: int
    log_path: str


class AgentProcess:
    """This node's agent, as its launcher has it.

    Args:
        make_orders: makes them from the descriptors on which the agent reads and writes.
        listen_fd: the socket that the agent is to host the store on; -1 for none. Stays the caller's.

    Raises:
        LaunchError: the system refused the process.
    """

    def __init__(self, make_orders: Callable[[int, int], Orders], listen_fd: int = -1) -> None:
        agent_reads, self._writing = os.pipe()
        self._reading, agent_writes = os.pipe()
        descriptors.keep_from_children(self._writing, self._reading)
        try:
            orders = make_orders(agent_reads, agent_writes)
            self._pid = _start(orders, [agent_reads, agent_writes, *([listen_fd] if listen_fd >= 0 else [])])
        except BaseException:
            descriptors.close(self._writing, self._reading)
            raise
        finally:
            os.close(agent_reads)
            os.close(agent_writes)
        self._pidfd = open_pidfd(self._pid)
        self._sender = EventSender(self._writing)
        self._receiver = EventReceiver(self._reading)
        self.log_path = orders.log_path

    def fileno(self) -> int:
        """Readable when the agent has said something, or has ended."""
        return self._reading

    def receive(self) -> tuple[list[Event], bool]:
        """What it has said since the last call, and whether it has ended."""
        return self._receiver.receive()

    def send(self, message: Event) -> None:
        """Tell it something. An agent that is gone is noticed elsewhere."""
        self._sender.send(message)

    def send_if_heard(self, message: Event) -> None:
        """The same for what may be left out: nothing if the agent does not listen at the moment."""
        if is_writable(self._writing):
            self._sender.send(message)

    def close(self, patience_s: float = _EXIT_S) -> None:
        """Wait for its end, which it knows to be due; not for longer than ``patience_s``."""
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


def _start(orders: Orders, inherited: list[int]) -> int:
    changes = {
        "OMP_NUM_THREADS": "1",
        # Or torch's handler would open a store on all interfaces, for workers that have one of their own.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    try:
        # The agent keeps the signals blocked that are held back at its start: a batch system signals all processes of
        # a job, and what follows from that is the launcher's to decide.
        return disown(
            start_program(
                "nblaunch.engines.agent",
                orders,
                inherited=inherited,
                environment={**env.snapshot(), **changes},
            )
        )
    except OSError as error:
        raise LaunchError(
            f"the process that meets the other nodes could not be started ({sys.executable}): {error}"
        ) from error
